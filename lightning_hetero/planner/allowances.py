"""List parts of the cluster to plan for, since more devices may make an iteration slower.

More devices mean more bubbles, more gradient traffic and, if all must be used, slow stages that the
others wait for. So the search also plans for parts of the cluster: some device types alone, their
fastest nodes, and few devices of each node. A cluster with one more device type has all parts of
the cluster without it, so its plan can't be worse. If there are few choices of whole nodes, all of
them are parts: then the same holds for a cluster with one more node of any kind.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.planner.arrangement import classify_nodes
from lightning_hetero.planner.estimating.stage_times import StageTimes
from lightning_hetero.planner.workload import Objective

__all__ = ["Scores", "smaller_allowances"]

_MOST_TYPES = 5
"""Most types of which every subset is tried; of more types, the best n, and all but one."""
_LEAST_PRICE = 1e-9
"""Price of nodes that cost nothing, as a share of the dearest node's."""
_MOST_CHOICES = 400
"""Most subsets of whole nodes, up to swapping equal nodes, for which all of them are tried."""


class Scores:
    """The objective of a search, in seconds or money, and the least score that devices could reach.

    Args:
        times: Seconds of stages on the cluster.
        objective: The quantity to minimise.
    """

    def __init__(self, times: StageTimes, objective: Objective) -> None:
        self._times = times
        self._nodes = times.cost.cluster.nodes
        self._is_price = objective is Objective.COST
        # Of nodes that cost nothing the fastest are best, so that they need some price.
        prices = [node.price_per_hour or 0.0 for node in self._nodes]
        self._least_price = _LEAST_PRICE * (max(prices) or 1.0)
        self._speeds: dict[tuple[int, ...], list[float]] = {}

    def weigh(self, time_s: float, nodes: Sequence[int]) -> float:
        """Return the score of an iteration of `time_s` seconds on some nodes: seconds, or price."""
        if self._is_price:
            price = self._times.cost.cluster.price_of(nodes) or 0.0
            return time_s / 3600 * max(price, self._least_price)
        return time_s

    def least(self, part: Sequence[int], tp_degrees: Sequence[int]) -> float:
        """Return about the least score of plans on a part of the cluster: of work alone."""
        degrees = tuple(tp_degrees)
        if degrees not in self._speeds:
            seconds = self._times.seconds_per_device
            self._speeds[degrees] = [1 / seconds(n, degrees) for n in range(len(self._nodes))]
        power = float(np.dot(part, self._speeds[degrees]))
        if not power:
            return math.inf
        num_microbatches = self._times.workload.num_microbatches
        return self.weigh(num_microbatches / power, np.flatnonzero(part).tolist())

    def burden(self, node: int, tp_degrees: Sequence[int]) -> float:
        """Return the device-seconds of a micro-batch on a node, or for COST their price."""
        seconds = self._times.seconds_per_device(node, tp_degrees)
        entry = self._nodes[node]
        price = max(entry.price_per_hour or 0.0, self._least_price)
        return seconds * price / entry.count if self._is_price else seconds


def smaller_allowances(cluster: Cluster, burden: Sequence[float]) -> list[tuple[int, ...]]:
    """Return parts of the cluster, without duplicates, as devices of each node; smallest first.

    Args:
        cluster: The cluster.
        burden: For every node the cost of a micro-batch there (`Scores.burden`); nodes with the
            highest are left out first.
    """
    counts = tuple(node.count for node in cluster.nodes)
    # Among equal devices, those in small nodes are left out first: they combine worst with others.
    order = sorted(range(len(counts)), key=lambda node: (burden[node], -counts[node], node))
    caps = [2**power for power in range(max(counts).bit_length())]
    parts: dict[tuple[int, ...], None] = {}
    for names in _choices(list(dict.fromkeys(cluster.nodes[node].device for node in order))):
        kept = [node for node in order if cluster.nodes[node].device in names]
        for nodes in (kept, *_fastest(kept)):
            whole = _only(counts, nodes)
            for part in (whole, *(tuple([min(n, cap) for n in whole]) for cap in caps)):
                parts[part] = None
        for nodes in _without_some(cluster, kept):
            parts[_only(counts, nodes)] = None
    parts |= dict.fromkeys(_every_choice(cluster, order))
    parts.pop(counts, None)
    return sorted(parts, key=sum)


def _choices(names: Sequence[str]) -> Iterator[set[str]]:
    """Yield subsets of device types: all of them, or a few of many. `names` has the best first."""
    if len(names) <= _MOST_TYPES:
        for size in range(1, len(names) + 1):
            yield from map(set, itertools.combinations(names, size))
    else:
        yield from (set(names[:size]) for size in range(1, len(names) + 1))
        yield from (set(names) - {name} for name in names)


def _every_choice(cluster: Cluster, order: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield all subsets of whole nodes, up to swapping equal nodes; none if there are too many."""
    counts = [node.count for node in cluster.nodes]
    classes = classify_nodes(cluster)
    alike: dict[tuple[int, int, float | None], list[int]] = {}
    for index in order:
        node = cluster.nodes[index]
        alike.setdefault((classes[index], node.count, node.price_per_hour), []).append(index)
    if math.prod(len(nodes) + 1 for nodes in alike.values()) > _MOST_CHOICES:
        return
    for numbers in itertools.product(*(range(len(nodes) + 1) for nodes in alike.values())):
        chosen = zip(alike.values(), numbers, strict=True)
        kept = [index for nodes, number in chosen for index in nodes[:number]]
        if kept:
            yield _only(counts, kept)


def _fastest(order: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield the best nodes: 1, 2, 3, 4, 6, 8, 12, ... of them."""
    for num_nodes in _spread(len(order)):
        yield order[:num_nodes]


def _without_some(cluster: Cluster, order: Sequence[int]) -> Iterator[list[int]]:
    """Yield the nodes without some of one type, the slowest ones."""
    for name in dict.fromkeys(cluster.nodes[node].device for node in order):
        of_type = [node for node in order if cluster.nodes[node].device == name]
        for kept in reversed(_spread(len(of_type))):
            dropped = set(of_type[kept:])
            yield [node for node in order if node not in dropped]


def _spread(most: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, ... below `most`, and `most - 1`."""
    sizes = {most - 1}
    size = 1
    while size < most:
        sizes |= {size, size + size // 2}
        size *= 2
    return sorted(size for size in sizes if 0 < size < most)


def _only(counts: Sequence[int], nodes: Sequence[int]) -> tuple[int, ...]:
    kept = set(nodes)
    return tuple([count if node in kept else 0 for node, count in enumerate(counts)])
