"""Measured times and memory of one model on some device types (AutoHet §III-D, Hydraulis B.2).

Layers are measured in blocks of 1, 2, 4, 8, ... at some micro-batches and TP degrees. A stage of n
layers costs the sum over the set bits of n (AutoHet Eq. 5); other micro-batches are estimated by a
fit over the measured ones (`TimeFit`). A profile is JSON; one that is broken, too old, or of other
versions or another model is refused.
"""

import dataclasses
import datetime
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.devices import DeviceSpec, canonical_name
from lightning_hetero.core.errors import ProfileError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.reading import build, check_numbers, plain, readable
from lightning_hetero.core.texts import load_file, parse_json, show

__all__ = [
    "BlockTimes",
    "DeviceProfile",
    "LayerMemory",
    "LinkTimes",
    "Profile",
    "TimeFit",
    "binary_blocks",
]

_FORMAT_VERSION = 1
# Non-negative least squares over three columns: the best fit over all subsets of columns.
_COLUMN_CHOICES = ([1], [1, 2], [0, 1], [0, 1, 2], [0, 2], [0], [2])


def binary_blocks(num_layers: int) -> tuple[int, ...]:
    """Return the powers of two that add up to `num_layers`, ascending."""
    return tuple(1 << bit for bit in range(num_layers.bit_length()) if num_layers >> bit & 1)


@readable
class BlockTimes:
    """Seconds of layers, embedding and head at one TP degree and one micro-batch."""

    tp_degree: int
    """Ranks that share the layers."""
    lengths: tuple[int, ...]
    """The micro-batch: tokens of each of its sequences."""
    blocks: Mapping[int, tuple[float, float]]
    """Number of layers (1, 2, 4, ...) to forward and backward seconds."""
    embedding: tuple[float, float] = (0.0, 0.0)
    """Forward and backward seconds of all modules before the first layer."""
    head: tuple[float, float] = (0.0, 0.0)
    """Forward and backward seconds of final norm, head and loss."""

    def __post_init__(self) -> None:
        where = f"Times at TP {self.tp_degree}, lengths {list(self.lengths)}"
        if self.tp_degree < 1 or not self.lengths or min(self.lengths) < 1:
            raise ProfileError(f"{where}: TP degree and lengths must be 1 or more.")
        if 1 not in self.blocks:
            raise ProfileError(f"{where} lack the block of 1 layer; measured: {list(self.blocks)}.")
        if any(size < 1 or size & (size - 1) for size in self.blocks):
            raise ProfileError(f"{where} have blocks {list(self.blocks)}; use powers of two.")
        times = [*self.blocks.values(), self.embedding, self.head]
        if not all(math.isfinite(t) and t >= 0 for pair in times for t in pair):
            raise ProfileError(f"{where} hold a negative or infinite time. Measure again.")

    def layers_s(self, num_layers: int) -> tuple[float, float]:
        """Return forward and backward seconds of n layers: Eq. 5 over the measured blocks.

        If n is the largest block's size or more, that block is repeated as often as it fits.
        """
        largest = max(self.blocks)
        times, rest = num_layers // largest, num_layers % largest
        forward = times * self.blocks[largest][0]
        backward = times * self.blocks[largest][1]
        for size in binary_blocks(rest):
            # A block that wasn't measured counts as two blocks of half its size.
            measured, factor = size, 1
            while measured not in self.blocks:
                measured, factor = measured // 2, factor * 2
            forward += factor * self.blocks[measured][0]
            backward += factor * self.blocks[measured][1]
        return forward, backward


@readable
class LayerMemory:
    """Measured memory of one rank at one TP degree."""

    tp_degree: int
    """Ranks that share the layer."""
    layer_bytes_per_token: float
    """Activations that one layer keeps for its backward, bytes per token of the micro-batch."""
    head_bytes_per_token: float = 0.0
    """The same, for final norm, head and loss."""
    embedding_bytes_per_token: float = 0.0
    """The same, for all modules before the first layer."""
    recomputed_bytes_per_token: float | None = None
    """The same, for one layer that is recomputed in backward and keeps only its input; None if it
    wasn't measured."""
    products_bytes_per_token: float | None = None
    """The same, for a layer that keeps only matrix products and attention, without its input; None
    if it wasn't measured."""

    def __post_init__(self) -> None:
        values = {name: value for name, value in vars(self).items() if name != "tp_degree"}
        check_numbers(ProfileError, "The measured memory", 1, tp_degree=self.tp_degree)
        check_numbers(ProfileError, f"Memory at TP {self.tp_degree}", 0, **values)


@readable
class LinkTimes:
    """Measured times of messages from one rank to another: a latency, then bytes at a rate."""

    bytes_per_s: float
    """Bandwidth of one direction, bytes/s."""
    latency_s: float
    """Seconds of an empty message."""

    def __post_init__(self) -> None:
        what = "A measured link"
        check_numbers(ProfileError, what, 0, is_above=True, bytes_per_s=self.bytes_per_s)
        check_numbers(ProfileError, what, 0, latency_s=self.latency_s)


@readable
class DeviceProfile:
    """All measurements on one device type."""

    device: str
    """Name of the device type, as cluster files use it."""
    times: tuple[BlockTimes, ...]
    """Times at each measured TP degree and micro-batch."""
    memory: tuple[LayerMemory, ...] = ()
    """Activation memory per TP degree; empty if it wasn't measured."""
    step_s_per_param: float | None = None
    """Optimizer seconds per parameter that the rank owns; None if it wasn't measured."""
    includes_tp_traffic: bool = True
    """Whether the times include the traffic inside TP groups, which a single rank can't measure."""
    inside_node: LinkTimes | None = None
    """Messages between two such devices of one node; None if they weren't measured."""
    spec: DeviceSpec | None = None
    """The device's memory, bandwidths and peak, under its name; None if the table of known devices
    has them."""

    def __post_init__(self) -> None:
        if not self.times:
            raise ProfileError(f"The profile of {self.device} holds no times. Measure it again.")
        what = f"The profile of {self.device}"
        check_numbers(ProfileError, what, 0, step_s_per_param=self.step_s_per_param)
        times = [f"{entry.tp_degree}, lengths {list(entry.lengths)}" for entry in self.times]
        memory = [f"{entry.tp_degree}" for entry in self.memory]
        for what, found in (("times", times), ("memory", memory)):
            twice = next((degree for degree in found if found.count(degree) > 1), None)
            if twice is not None:
                raise ProfileError(
                    f"The profile of {self.device} has {what} at TP {twice} twice. Keep one."
                )
        if self.spec is not None and self.spec.name != self.device:
            raise ProfileError(
                f"The profile of {self.device} describes a device {self.spec.name!r}. Give both "
                "one name."
            )

    @property
    def tp_degrees(self) -> tuple[int, ...]:
        """TP degrees that were measured, ascending."""
        return tuple(sorted({times.tp_degree for times in self.times}))

    def at(self, tp_degree: int) -> tuple[BlockTimes, ...]:
        """Return the times at a TP degree; ProfileError names the measured degrees."""
        found = tuple(times for times in self.times if times.tp_degree == tp_degree)
        if not found:
            raise ProfileError(
                f"The profile of {self.device} has TP degrees {list(self.tp_degrees)}, not "
                f"{tp_degree}. Measure it with `lightning-hetero profile --tp-degrees {tp_degree}`."
            )
        return found


@readable
class Profile:
    """Measurements of one model on one or more device types.

    ::

        profile = Profile.load("profile.json")  # from `lightning-hetero profile`
        forward_s, backward_s = profile.device("A100-80GB").at(1)[0].layers_s(8)

    """

    model: ModelSpec
    """The model that was measured."""
    devices: tuple[DeviceProfile, ...]
    """Measurements per device type."""
    versions: Mapping[str, str]
    """Versions of the packages that ran, such as {"torch": "2.13.0"}."""
    date: datetime.datetime
    """When it was measured, with its time zone."""
    between_nodes: LinkTimes | None = None
    """Messages between two nodes; None if they weren't measured."""

    def __post_init__(self) -> None:
        names = [device.device for device in self.devices]
        if not names or len(set(names)) < len(names):
            raise ProfileError(f"A profile has devices {names}; name each once, at least one.")
        if self.date.tzinfo is None:
            raise ProfileError(f"The profile's date {self.date} lacks its time zone.")

    def device(self, name: str) -> DeviceProfile:
        """Return the measurements on a device type; ProfileError names the measured ones."""
        for device in self.devices:
            if device.device == name:
                return device
        known = canonical_name(name)
        for device in self.devices:
            if known is not None and canonical_name(device.device) == known:
                return device
        raise ProfileError(
            f"The profile has devices {[device.device for device in self.devices]}, not {name!r}. "
            "Run `lightning-hetero profile` on such a device and merge the files."
        )

    @property
    def device_specs(self) -> tuple[DeviceSpec, ...]:
        """The device types that the profile describes itself."""
        return tuple(device.spec for device in self.devices if device.spec is not None)

    def with_links(self, cluster: Cluster) -> Cluster:
        """Return the cluster with measured bandwidths and latencies; its `links` stay."""
        changes: dict[str, Any] = {}
        if self.between_nodes is not None:
            changes["inter_node_bytes_per_s"] = self.between_nodes.bytes_per_s
            changes["inter_node_latency_s"] = self.between_nodes.latency_s
        devices = {spec.name: spec for spec in cluster.devices}
        inside = []
        for index in {node.device: i for i, node in enumerate(cluster.nodes)}.values():
            spec = cluster.device_of_node(index)
            measured = self.device(spec.name).inside_node
            if measured is not None:
                devices[spec.name] = dataclasses.replace(
                    spec, intra_node_bytes_per_s=measured.bytes_per_s
                )
                inside.append(measured.latency_s)
        if inside:
            changes |= {"devices": tuple(devices.values()), "intra_node_latency_s": max(inside)}
        return dataclasses.replace(cluster, **changes)

    def check(
        self,
        *,
        model: ModelSpec | None = None,
        versions: Mapping[str, str] | None = None,
        max_age: datetime.timedelta | None = None,
    ) -> None:
        """Raise ProfileError if the profile is of another model, other versions or too old."""
        if model is not None and dataclasses.replace(model, name="") != dataclasses.replace(
            self.model, name=""
        ):
            raise ProfileError(
                f"The profile is of {self.model.name!r} with other sizes than {model.name!r}. "
                "Measure this model with `lightning-hetero profile`."
            )
        for package, version in (versions or {}).items():
            if self.versions.get(package) != version:
                raise ProfileError(
                    f"The profile was measured with {package} {self.versions.get(package)} but "
                    f"{version} runs. Measure again with `lightning-hetero profile`."
                )
        age = datetime.datetime.now(datetime.UTC) - self.date
        if max_age is not None and age > max_age:
            raise ProfileError(
                f"The profile is {age.days} days old; {max_age.days} are allowed. Measure again "
                "with `lightning-hetero profile`."
            )

    def merge(self, other: Self) -> Self:
        """Return one profile with the device types of both; of equal types the other's is used.

        Raises:
            ProfileError: They are of different models or versions.
        """
        other.check(model=self.model, versions=self.versions)
        names = {device.device for device in other.devices}
        kept = tuple(device for device in self.devices if device.device not in names)
        return dataclasses.replace(
            self,
            devices=kept + other.devices,
            date=min(self.date, other.date),
            between_nodes=other.between_nodes or self.between_nodes,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as JSON-ready dicts and lists."""
        return {"format": _FORMAT_VERSION, **plain(self)}

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Build a profile from the data of `to_dict`; ProfileError if it is broken."""
        if not isinstance(data, Mapping) or data.get("format") != _FORMAT_VERSION:
            found = show(data.get("format")) if isinstance(data, Mapping) else type(data).__name__
            raise ProfileError(
                f"The profile has format {found}; this version reads {_FORMAT_VERSION}. Measure "
                "again with `lightning-hetero profile`."
            )
        return build(
            cls,
            {key: value for key, value in data.items() if key != "format"},
            "profile",
            ProfileError,
        )

    def save(self, path: str | Path) -> None:
        """Write the profile as a JSON file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a profile from a JSON file; ProfileError names the file that is wrong or missing."""
        return load_file(path, "profile", ProfileError, cls._parse)

    @classmethod
    def _parse(cls, text: str) -> Self:
        return cls.from_dict(parse_json(text, "profile", ProfileError))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeFit:
    """T(l) = a·l² + b·l + c of one stage, forward and backward; c is added once per micro-batch."""

    a: float
    """Seconds per squared token of a sequence."""
    b: float
    """Seconds per token."""
    c: float
    """Seconds per micro-batch."""

    def __call__(self, lengths: Sequence[int]) -> float:
        """Return the seconds of a micro-batch of sequences of these lengths."""
        squares = sum(length * length for length in lengths)
        return self.a * squares + self.b * sum(lengths) + self.c

    @classmethod
    def of(cls, samples: Sequence[tuple[Sequence[int], float]], *, needs_b: bool = False) -> Self:
        """Fit measured (lengths, seconds) by least squares of relative errors.

        Coefficients that would be negative become 0, and so do those that the samples can't
        distinguish: a single length can't show the square. With `needs_b`, b is above 0 even if the
        samples fit better without it.
        """
        features = np.array(
            [[sum(n * n for n in lengths), sum(lengths), 1.0] for lengths, _ in samples]
        )
        seconds = np.array([value for _, value in samples])
        weights = 1.0 / np.maximum(seconds, 1e-12)
        best, best_error = np.zeros(3), math.inf
        for columns in _COLUMN_CHOICES:
            chosen = features[:, columns]
            scale = np.abs(chosen).max(axis=0)
            system = chosen / scale * weights[:, None]
            if np.linalg.matrix_rank(system, tol=1e-6 * np.linalg.norm(system)) < len(columns):
                continue
            solution = np.linalg.lstsq(system, seconds * weights, rcond=None)[0]
            error = float(np.sum((system @ solution - seconds * weights) ** 2))
            if needs_b and not (1 in columns and solution[columns.index(1)] > 0):
                continue
            if np.all(solution >= 0) and error < best_error - 1e-12:
                best, best_error = np.zeros(3), error
                best[columns] = solution / scale
        return cls(a=float(best[0]), b=float(best[1]), c=float(best[2]))
