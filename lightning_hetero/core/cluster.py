"""Describe a cluster: nodes, their devices and the links between them.

Ranks are numbered node by node in the order given, so rank r of the cluster is global rank r of the
run. A cluster file is YAML::

    nodes:
      - {device: A100-80GB, count: 4}
      - {device: H800-80GB, count: 2, price_per_hour: 9.5}
    inter_node_bytes_per_s: 400 Gbit/s
    links:
      - {nodes: [0, 1], bytes_per_s: 12.5 GB/s, latency_s: 20 us}
"""

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from lightning_hetero.core.devices import DeviceSpec, canonical_name, find_device
from lightning_hetero.core.errors import ClusterError
from lightning_hetero.core.reading import build, check_numbers, readable
from lightning_hetero.core.texts import load_file, parse_yaml

__all__ = ["Cluster", "Link", "Node"]

_MOST_DEVICES = 2**20


@readable
class Node:
    """One machine with devices of one type."""

    device: str
    """Name of the device type: a known one or one of the cluster's `devices`."""
    count: int
    """Number of devices, 1 or more."""
    price_per_hour: float | None = None
    """Price of the whole node for an hour, in any one currency; None if unknown."""
    host_memory_bytes: float | None = None
    """Bytes of host memory that the node's ranks together may use for slices that they own; None if
    none."""
    host_memory_bytes_per_s: float = 200e9
    """Bandwidth of that memory, shared by all optimizer steps on the host, bytes/s."""

    def __post_init__(self) -> None:
        if type(self.count) is not int or not 1 <= self.count <= _MOST_DEVICES:
            raise ClusterError(
                f"Node of {self.device} has count {self.count!r}; it must be a whole number, 1 or "
                f"more, {_MOST_DEVICES:,} at most. Leave a node without devices out."
            )
        refuse = functools.partial(check_numbers, ClusterError, f"Node of {self.device}")
        refuse(0, price_per_hour=self.price_per_hour)
        refuse(0, is_above=True, host_memory_bytes=self.host_memory_bytes)
        refuse(0, is_above=True, host_memory_bytes_per_s=self.host_memory_bytes_per_s)


@readable
class Link:
    """Bandwidth and latency between two nodes, if they differ from the cluster's."""

    nodes: tuple[int, int]
    """Indices of the two nodes; equal ones describe the link inside that node."""
    bytes_per_s: float
    """Bandwidth of one direction, bytes/s."""
    latency_s: float | None = None
    """Latency of a message, seconds; None takes the cluster's."""

    def __post_init__(self) -> None:
        what = f"Link between nodes {list(self.nodes)}"
        check_numbers(ClusterError, what, 0, is_above=True, bytes_per_s=self.bytes_per_s)
        check_numbers(ClusterError, what, 0, latency_s=self.latency_s)


@readable
class Cluster:
    """All nodes and the links between them.

    Raises:
        ClusterError: No nodes, an unknown device, or links that contradict each other.
    """

    nodes: tuple[Node, ...]
    """The machines; ranks are numbered node by node."""
    inter_node_bytes_per_s: float = 50e9
    """Bandwidth of one rank to another node, one direction, bytes/s (400 Gb/s by default)."""
    inter_node_latency_s: float = 10e-6
    """Latency of a message between nodes, seconds."""
    intra_node_latency_s: float = 3e-6
    """Latency of a message inside a node, seconds."""
    links: tuple[Link, ...] = ()
    """Links that differ from these defaults."""
    devices: tuple[DeviceSpec, ...] = ()
    """Device types that the built-in table lacks, or that replace its own."""

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ClusterError("The cluster has no nodes, so 0 devices. Name at least one node.")
        names = [device.name for device in self.devices]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ClusterError(f"`devices` describes {twice} twice. Keep one of each.")
        # Short names are spelt out, so that names can be compared.
        nodes = tuple(
            replace(node, device=find_device(node.device, self.devices).name) for node in self.nodes
        )
        object.__setattr__(self, "nodes", nodes)
        refuse = functools.partial(check_numbers, ClusterError, "The cluster")
        refuse(0, is_above=True, inter_node_bytes_per_s=self.inter_node_bytes_per_s)
        refuse(0, inter_node_latency_s=self.inter_node_latency_s)
        refuse(0, intra_node_latency_s=self.intra_node_latency_s)
        self._check_links()

    @functools.cached_property
    def backend(self) -> str:
        """The backend by which a run's ranks communicate: "gloo" if any device is a CPU."""
        is_any_cpu = any(find_device(n.device, self.devices).is_cpu for n in self.nodes)
        return "gloo" if is_any_cpu else "nccl"

    def _check_links(self) -> None:
        seen: dict[tuple[int, int], Link] = {}
        for link in self.links:
            low, high = sorted(link.nodes)
            if low < 0 or high >= len(self.nodes):
                raise ClusterError(
                    f"A link joins nodes {list(link.nodes)} but the cluster has nodes 0 to "
                    f"{len(self.nodes) - 1}. Name two of these."
                )
            first = seen.setdefault((low, high), link)
            if (first.bytes_per_s, first.latency_s) != (link.bytes_per_s, link.latency_s):
                raise ClusterError(
                    f"Two links between nodes {low} and {high} contradict each other: "
                    f"({first.bytes_per_s:g} bytes/s, latency_s {first.latency_s}) and "
                    f"({link.bytes_per_s:g} bytes/s, latency_s {link.latency_s}). Keep one."
                )

    @property
    def num_ranks(self) -> int:
        """Number of devices."""
        return sum(node.count for node in self.nodes)

    def node_of(self, global_rank: int) -> int:
        """Return the index of the node on which a rank runs."""
        first = 0
        for node_index, node in enumerate(self.nodes):
            if first <= global_rank < first + node.count:
                return node_index
            first += node.count
        raise ClusterError(
            f"Rank {global_rank} doesn't exist: the cluster has {self.num_ranks} devices."
        )

    def ranks_of(self, node_index: int) -> range:
        """Return the ranks of a node."""
        first = sum(node.count for node in self.nodes[:node_index])
        return range(first, first + self.nodes[node_index].count)

    def without(self, lost: Collection[int]) -> Self:
        """Return the cluster without some ranks; the others are numbered anew, in order.

        Raises:
            ClusterError: No rank is left.
        """
        counts = [
            sum(rank not in lost for rank in self.ranks_of(index))
            for index in range(len(self.nodes))
        ]
        left = [index for index, count in enumerate(counts) if count]
        place = {index: position for position, index in enumerate(left)}
        links = (
            replace(link, nodes=(place[link.nodes[0]], place[link.nodes[1]]))
            for link in self.links
            if place.keys() >= set(link.nodes)
        )
        nodes = tuple(replace(self.nodes[index], count=counts[index]) for index in left)
        return replace(self, nodes=nodes, links=tuple(links))

    def device_of(self, global_rank: int) -> DeviceSpec:
        """Return the device of a rank."""
        return self.device_of_node(self.node_of(global_rank))

    def device_of_node(self, node_index: int) -> DeviceSpec:
        """Return the device type of a node."""
        return find_device(self.nodes[node_index].device, self.devices)

    def link_between(self, node_a: int, node_b: int) -> tuple[float, float]:
        """Return (bytes/s, latency in seconds) between a rank of one node and one of the other."""
        inside = node_a == node_b
        latency_s = self.intra_node_latency_s if inside else self.inter_node_latency_s
        for link in self.links:
            if sorted(link.nodes) == sorted((node_a, node_b)):
                return link.bytes_per_s, latency_s if link.latency_s is None else link.latency_s
        if inside:
            return self.device_of_node(node_a).intra_node_bytes_per_s, latency_s
        return self.inter_node_bytes_per_s, latency_s

    @property
    def num_devices(self) -> dict[str, int]:
        """Number of devices of each type, the types in order of their first node."""
        counts: Counter[str] = Counter()
        for node in self.nodes:
            counts[node.device] += node.count
        return dict(counts)

    @property
    def price_per_hour(self) -> float | None:
        """Price of all nodes for an hour, or None if a node has none."""
        return self.price_of(range(len(self.nodes)))

    def price_of(self, node_indices: Iterable[int]) -> float | None:
        """Return the price of some nodes for an hour, or None if one has none."""
        prices = [self.nodes[index].price_per_hour for index in node_indices]
        known = [price for price in prices if price is not None]
        return sum(known) if len(known) == len(prices) else None

    @classmethod
    def from_dict(cls, data: Any, *, measured: Sequence[DeviceSpec] = ()) -> Self:
        """Build and validate a cluster from plain data.

        Args:
            data: Nodes, links and devices; numbers may have units: "80 GiB", "400 Gbit/s".
            measured: Devices that nodes may name besides the known ones and the cluster's own,
                such as those of a profile.

        Raises:
            ClusterError: A key is missing or unknown, a value has the wrong type, or the cluster
                is invalid.
        """
        return build(cls, _with_devices(data, measured), "cluster", ClusterError)

    @classmethod
    def from_yaml(cls, text: str, *, measured: Sequence[DeviceSpec] = ()) -> Self:
        """Parse a YAML text; ClusterError if it isn't YAML or isn't a valid cluster."""
        data = parse_yaml(text, "cluster", ClusterError)
        return cls.from_dict(data, measured=measured)

    @classmethod
    def load(cls, path: str | Path, *, measured: Sequence[DeviceSpec] = ()) -> Self:
        """Read a cluster from a YAML file; ClusterError names the file if it is wrong."""
        parse = functools.partial(cls.from_yaml, measured=measured)
        return load_file(path, "cluster", ClusterError, parse)


def _with_devices(data: Any, measured: Sequence[DeviceSpec]) -> Any:
    """Return a cluster's data, and the measured devices that neither it nor the table describes."""
    own = data.get("devices", []) if isinstance(data, Mapping) else None
    if not isinstance(own, list):
        return data
    described = {str(device.get("name")) for device in own if isinstance(device, Mapping)}
    added = [d for d in measured if d.name not in described and canonical_name(d.name) is None]
    return {**data, "devices": [*own, *added]} if added else data
