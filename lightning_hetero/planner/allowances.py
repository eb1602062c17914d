"""Which devices a plan may use: all, or fewer where the others would only slow it down.

More devices mean more bubbles, more gradient traffic and, where every one has to be used, weak ones
that hold everybody up. So the search also looks at parts of the cluster: without a type of devices,
without some nodes of a type, the fastest nodes alone, and few devices of each node.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightning_hetero.core.cluster import Cluster

__all__ = ["Allowance", "smaller_allowances"]


class Allowance(NamedTuple):
    """Devices that may be used."""

    counts: tuple[int, ...]
    """Devices of each node."""
    is_thorough: bool
    """Whether the solvers are worth their time here, or even deals will do."""


def smaller_allowances(cluster: Cluster, burden: Sequence[float]) -> list[Allowance]:
    """Return parts of the cluster, each once, the smallest first.

    Args:
        cluster: The cluster.
        burden: For every node what a device's work costs there, in seconds or money; nodes with
            the most are left out first.
    """
    counts = tuple(node.count for node in cluster.nodes)
    order = sorted(range(len(counts)), key=lambda node: (burden[node], node))
    parts = dict.fromkeys(_without_types(cluster, order, counts), True)
    for nodes in (*_fastest(order), *_without_some(cluster, order)):
        parts.setdefault(_only(counts, nodes), False)
    caps = {2**power for power in range(max(counts).bit_length())}
    for nodes in (order, *_fastest(order)):
        for cap in sorted(caps):
            capped = tuple(min(count, cap) for count in _only(counts, nodes))
            parts.setdefault(capped, False)
    parts.pop(counts, None)
    return [Allowance(part, parts[part]) for part in sorted(parts, key=sum)]


def _without_types(
    cluster: Cluster, order: Sequence[int], counts: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """Yield the cluster without each type, and with its best types alone."""
    names = list(dict.fromkeys(cluster.nodes[node].device for node in order))
    if len(names) == 1:
        return
    left_out = [{name} for name in reversed(names)]
    left_out += [set(names[kept:]) for kept in range(len(names) - 2, 0, -1)]
    for dropped in left_out:
        yield _only(counts, [n for n in order if cluster.nodes[n].device not in dropped])


def _fastest(order: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield the best nodes: 1, 2, 3, 4, 6, 8, 12, ... of them."""
    for num_nodes in _spread(len(order)):
        yield order[:num_nodes]


def _without_some(cluster: Cluster, order: Sequence[int]) -> Iterator[list[int]]:
    """Yield the cluster with fewer nodes of one type."""
    for name in dict.fromkeys(cluster.nodes[node].device for node in order):
        of_type = [node for node in order if cluster.nodes[node].device == name]
        for kept in reversed(_spread(len(of_type))):
            dropped = set(of_type[kept:])
            yield [node for node in order if node not in dropped]


def _spread(most: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, ... below a number, and the last one below it."""
    sizes = {most - 1}
    size = 1
    while size < most:
        sizes |= {size, size + size // 2}
        size *= 2
    return sorted(size for size in sizes if 0 < size < most)


def _only(counts: Sequence[int], nodes: Sequence[int]) -> tuple[int, ...]:
    kept = set(nodes)
    return tuple(count if node in kept else 0 for node, count in enumerate(counts))
