"""Choose the nodes that a plan for cost pays for, by the price of fractional pipelines.

Nodes of a class differ in their price only, so a set is a number of nodes of each class, the
cheapest ones. Its score is the least seconds of the master times the price of its nodes. Numbers
are tried on a grid of powers of two, then one node more or less from the best.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

from lightning_hetero.core.cluster import Cluster

__all__ = ["likeliest_node_sets"]

_GRID = 64
"""Sets of the grid that are tried: three classes of up to eight nodes."""
_STEPS = 8
"""Rounds of one node more or less at most."""
_KEPT = 3
"""Sets that plans are made for."""


def likeliest_node_sets(
    cluster: Cluster, class_of_node: Sequence[int], least_s: Callable[[Sequence[int]], float]
) -> list[list[int]]:
    """Return devices of each node that may be used, for the likeliest sets of nodes.

    Args:
        cluster: The nodes, all with prices.
        class_of_node: Class of each node.
        least_s: Returns the least seconds of an iteration with so many devices of each node.
    """
    members: dict[int, list[int]] = {}
    for index, kind in enumerate(class_of_node):
        members.setdefault(kind, []).append(index)
    for row in members.values():
        row.sort(key=lambda index: (_price(cluster, index), index))
    scores: dict[tuple[int, ...], tuple[float, float]] = {}

    def rate(numbers: tuple[int, ...]) -> None:
        if numbers not in scores and any(numbers):
            chosen = _chosen(members, numbers)
            seconds = least_s(_counts(cluster, chosen))
            scores[numbers] = seconds * (cluster.price_of(chosen) or 0.0), seconds

    full = tuple(len(row) for row in members.values())
    for numbers in itertools.chain([full], _grid(full)):
        rate(numbers)
    for _ in range(_STEPS):
        best, before = min(scores, key=scores.__getitem__), len(scores)
        for index, step in itertools.product(range(len(full)), (-1, 1)):
            moved = tuple(n + step * (i == index) for i, n in enumerate(best))
            if 0 <= moved[index] <= full[index]:
                rate(moved)
        if len(scores) == before:
            break
    likeliest = sorted(scores, key=scores.__getitem__)[:_KEPT]
    return [_counts(cluster, _chosen(members, numbers)) for numbers in likeliest]


def _grid(full: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield all nodes of one class alone, and powers of two of each class."""
    yield from (tuple(n * (i == only) for i, n in enumerate(full)) for only in range(len(full)))
    steps = [
        sorted({0, *(2**i for i in range(most.bit_length()) if 2**i < most), most}) for most in full
    ]
    yield from itertools.islice(itertools.product(*steps), _GRID)


def _price(cluster: Cluster, index: int) -> float:
    node = cluster.nodes[index]
    return (node.price_per_hour or 0.0) / node.count


def _chosen(members: dict[int, list[int]], numbers: Sequence[int]) -> set[int]:
    return {i for row, n in zip(members.values(), numbers, strict=True) for i in row[:n]}


def _counts(cluster: Cluster, chosen: set[int]) -> list[int]:
    return [node.count * (index in chosen) for index, node in enumerate(cluster.nodes)]
