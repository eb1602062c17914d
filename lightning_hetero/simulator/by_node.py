"""Seconds of a push straight to the owners, and of one that is summed on each node first.

Straight, each of n holders of S bytes sends S·(n - 1)/n. By node, with g holders on each, it sends
S·(g - 1)/g inside its node and then a sum to each of (n - g)/g others, S/n each if sums are as wide
as gradients: see `runtime.exchange.by_node`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil

from lightning_hetero.simulator.cluster_links import ClusterLinks, pairwise_s

__all__ = ["push_by_node_s", "push_straight_s"]


def push_straight_s(links: ClusterLinks, ranks: Sequence[int], num_bytes: float) -> float:
    """Return the seconds in which holders send each other their pieces of `num_bytes` each."""
    nodes = Counter(links.node_of_rank[rank] for rank in ranks)
    piece = num_bytes / len(ranks)
    return max(
        _sends_s(
            links, node, {other: count - (other == node) for other, count in nodes.items()}, piece
        )
        for node in nodes
    )


def push_by_node_s(
    links: ClusterLinks, ranks: Sequence[int], num_bytes: float, *, width: float
) -> float:
    """Return the seconds of the same push if it is summed on each node first.

    If no node has several holders, or one has all, the runtime sends straight.

    Args:
        links: The cluster's links.
        ranks: The holders.
        num_bytes: Bytes of gradients that each of them holds.
        width: Bytes of a value in a sum, over those of a value in a gradient on its way.
    """
    nodes = Counter(links.node_of_rank[rank] for rank in ranks)
    if len(nodes) in (1, len(ranks)):
        return push_straight_s(links, ranks, num_bytes)
    inside_s = max(
        _sends_s(links, node, {node: count - 1}, num_bytes / count) for node, count in nodes.items()
    )
    between_s = max(
        _sends_s(
            links,
            node,
            {other: ceil(far / count) for other, far in nodes.items() if other != node},
            num_bytes / len(ranks) * width,
        )
        for node, count in nodes.items()
    )
    return inside_s + between_s


def _sends_s(links: ClusterLinks, node: int, counts: Mapping[int, int], num_bytes: float) -> float:
    """Return the seconds in which a rank of `node` sends `counts` messages to each node's ranks."""
    first = links.first_rank_of_node
    return pairwise_s(
        (
            count,
            links.transfer_s(first[node], first[other], num_bytes),
            links.link(first[node], first[other])[1],
        )
        for other, count in counts.items()
    )
