"""Seconds of a push straight to the owners, and of one that is summed on each node first.

Of S bytes each of n holders sends S·(n - 1)/n straight away. By node, with g of them on one, it
sends S·(g - 1)/g inside and then a sum to (n - g)/g others, S/n each if as wide as what was summed:
see `runtime.exchange.by_node`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil

from lightning_hetero.simulator.cluster_links import ClusterLinks, pairwise_s

__all__ = ["push_by_node_s", "push_straight_s"]


def push_straight_s(links: ClusterLinks, ranks: Sequence[int], num_bytes: float) -> float:
    """Return the seconds in which holders send each other their pieces of as many bytes."""
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
    """Return the seconds of the same by node.

    Args:
        links: Of the cluster.
        ranks: The holders.
        num_bytes: Held by each of them.
        width: Bytes of a sum's value over those of a gradient's on its way.
    """
    nodes = Counter(links.node_of_rank[rank] for rank in ranks)
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
    """Return the seconds in which a rank of a node sends so many messages to those of others."""
    first = links.first_rank_of_node
    return pairwise_s(
        (
            count,
            links.transfer_s(first[node], first[other], num_bytes),
            links.link(first[node], first[other])[1],
        )
        for other, count in counts.items()
    )
