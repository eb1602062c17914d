"""Seconds of messages over a cluster's links, and of collectives: in a ring or pairwise.

With a `MessageCurve` small messages reach less of a link's rate, as NCCL's do. For n ranks and S
bytes in total, ring and pairwise move S·(n-1)/n out of each rank and as much in. A ring pays n-1
latencies, one after another, and goes over every link of the ring; pairwise pays one, as its
messages are under way together. NCCL's trees serve all-reduces only, which an exchange doesn't use.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import numpy as np

from lightning_hetero.core.cluster import Cluster

__all__ = ["ClusterLinks", "pairwise_s", "ring_s"]


class ClusterLinks:
    """The links between the ranks of a cluster.

    Args:
        cluster: The cluster; its nodes' devices are the ranks, in their order.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.message_curve = cluster.inter_node_curve
        """Seconds of a message between nodes by its size, over a link of the cluster's usual rate;
        None if messages of all sizes reach their link's rate."""
        self.node_of_rank = [
            index for index, node in enumerate(cluster.nodes) for _ in range(node.count)
        ]
        self.first_rank_of_node = [0, *accumulate(node.count for node in cluster.nodes)][:-1]
        self.special_links = {
            (low, high): cluster.link_between(low, high)
            for low, high in (sorted(link.nodes) for link in cluster.links)
            if low != high
        }
        inside = [cluster.link_between(index, index) for index in range(len(cluster.nodes))]
        self.inside_bytes_per_s, self.inside_latency_s = np.array(inside).T.copy()
        """[nodes] Rate and latency of one direction between ranks of each node."""
        self._links: dict[tuple[int, int], tuple[float, float]] = {}

    def link(self, rank_a: int, rank_b: int) -> tuple[float, float]:
        """Return (bytes/s, latency in seconds) of one direction between two ranks."""
        key = (self.node_of_rank[rank_a], self.node_of_rank[rank_b])
        found = self._links.get(key)
        if found is None:
            found = self._links[key] = self.cluster.link_between(*key)
        return found

    def transfer_s(self, sender: int, receiver: int, num_bytes: float) -> float:
        """Return the seconds of one message between two ranks."""
        bytes_per_s, latency_s = self.link(sender, receiver)
        is_inside = self.node_of_rank[sender] == self.node_of_rank[receiver]
        if self.message_curve is None or is_inside:
            return latency_s + num_bytes / bytes_per_s
        usual_bytes_per_s = self.cluster.inter_node_bytes_per_s
        return latency_s + self.message_curve(num_bytes) * usual_bytes_per_s / bytes_per_s

    def all_reduce_s(self, ranks: Sequence[int], num_bytes: float) -> float:
        """Return the seconds of a ring all-reduce: a reduce-scatter and an all-gather."""
        return 2 * self.ring_s(ranks, num_bytes)

    def ring_s(self, ranks: Sequence[int], num_bytes: float) -> float:
        """Return the seconds of a ring's all-gather or reduce-scatter, over its slowest link."""
        if len(ranks) < 2:
            return 0.0
        # Links between the same two nodes are equally fast.
        links = {
            (self.node_of_rank[a], self.node_of_rank[b]): (a, b)
            for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True)
        }

        def message_s(num_bytes: float) -> float:
            return max(self.transfer_s(a, b, num_bytes) for a, b in links.values())

        return ring_s(len(ranks), num_bytes, message_s)


def ring_s(num_ranks: int, num_bytes: float, message_s: Callable[[float], float]) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of these bytes in total.

    An all-reduce is one of each.
    """
    return (num_ranks - 1) * message_s(num_bytes / num_ranks)


def pairwise_s(messages: Iterable[tuple[int, float, float]]) -> float:
    """Return the seconds in which a rank sends each other rank its piece.

    Args:
        messages: For each kind: (number of messages, seconds of each, latency of each).
    """
    found = [item for item in messages if item[0]]
    latency_s = max((latency_s for _, _, latency_s in found), default=0.0)
    return latency_s + sum(count * (seconds - own_s) for count, seconds, own_s in found)
