"""Seconds of messages and of rings over a cluster's links."""

from collections.abc import Sequence

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.simulator.collective_times import ring_s

__all__ = ["ClusterLinks"]


class ClusterLinks:
    """The links between the ranks of a cluster.

    Args:
        cluster: Its nodes' devices are the ranks, in their order.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.message_curve = cluster.inter_node_curve
        """Rate of a message between nodes by its size, over a link of the cluster's usual rate;
        None if messages of all sizes reach their link's rate."""
        self.node_of_rank = [
            index for index, node in enumerate(cluster.nodes) for _ in range(node.count)
        ]
        self.special_links = {
            (low, high): cluster.link_between(low, high)
            for low, high in (sorted(link.nodes) for link in cluster.links)
            if low != high
        }
        self.inside_links = [cluster.link_between(i, i) for i in range(len(cluster.nodes))]
        """(bytes/s, latency in seconds) of one direction between ranks of each node."""
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
        # Links between the same nodes take as long.
        links = {
            (self.node_of_rank[a], self.node_of_rank[b]): (a, b)
            for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True)
        }

        def message_s(num_bytes: float) -> float:
            return max(self.transfer_s(a, b, num_bytes) for a, b in links.values())

        return ring_s(len(ranks), num_bytes, message_s)
