"""Seconds of messages over a cluster's links, and of collectives: in a ring, pairwise or by node.

With a `MessageCurve` small messages reach less of a link's rate, as NCCL's do. For n ranks and S
bytes in total, ring and pairwise move S·(n-1)/n out of each rank and as much in. A ring pays n-1
latencies, one after another, and goes over every link of the ring; pairwise pays one, as its
messages are under way together. NCCL's trees serve all-reduces only, which an exchange doesn't use.

By node, each of n holders of S bytes, g of them on each node, sends S·(g - 1)/g inside its node and
then a sum to each of (n - g)/g others, S/n each if sums are as wide as gradients: see
`runtime.exchange.by_node`.

A search times thousands of plans, so exchanges of many pieces are computed at once, as arrays of
[D, G]: D holders of each of G pieces, which exchange among themselves.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from math import ceil

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.core.cluster import Cluster

__all__ = [
    "ClusterLinks",
    "Peers",
    "push_by_node_s",
    "push_straight_s",
    "ring_s",
    "rings_inside_s",
    "rings_s",
]


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

    def carried_s(self, num_bytes: FloatArray) -> FloatArray:
        """Return the seconds of messages over a usual link between nodes, without latency."""
        if self.message_curve is None:
            return num_bytes / self.cluster.inter_node_bytes_per_s
        return np.array([self.message_curve(size) for size in num_bytes.tolist()])

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


class Peers:
    """The links of each holder to all others of its piece.

    Linear in holders and links: peers on other nodes count at the cluster's rate, and the few links
    that differ correct that.

    Args:
        links: The cluster's links.
        nodes: [D, G] nodes of the holders of each piece.
    """

    def __init__(self, links: ClusterLinks, nodes: IntArray) -> None:
        cluster = links.cluster
        num_holders, num_pieces = nodes.shape
        size = num_pieces, len(cluster.nodes)
        columns = np.arange(num_pieces)
        places = (columns * size[1] + nodes).ravel()
        per_node = np.bincount(places, minlength=size[0] * size[1]).reshape(size)
        near = per_node[columns, nodes] - 1
        far = num_holders - 1 - near
        usual = far.astype(float)
        # Who has no such peers has no latency.
        latency = (near > 0) * links.inside_latency_s[nodes]
        for pair, (bytes_per_s, latency_s) in links.special_links.items():
            for node, peer in (pair, pair[::-1]):
                peers = (nodes == node) * per_node[:, peer]
                far -= peers
                usual += peers * (cluster.inter_node_bytes_per_s / bytes_per_s - 1)
                np.maximum(latency, (peers > 0) * latency_s, out=latency)
        self._links = links
        self._near_s = near / links.inside_bytes_per_s[nodes]
        self._usual = usual
        self._latency_s = np.maximum(latency, (far > 0) * cluster.inter_node_latency_s)

    def sends_s(self, num_bytes: FloatArray) -> FloatArray:
        """Return the seconds, [D, G], in which holders send each peer a message of these bytes.

        Args:
            num_bytes: [D, G] bytes of each message.
        """
        carried_s = self._links.carried_s(num_bytes.ravel()).reshape(num_bytes.shape)
        seconds: FloatArray = self._latency_s + num_bytes * self._near_s + self._usual * carried_s
        return seconds


def rings_s(links: ClusterLinks, nodes: IntArray, num_bytes: FloatArray) -> FloatArray:
    """Return the seconds, [G], of a ring's all-gather or reduce-scatter of each piece.

    Holders stand in the ring in the order of their nodes.

    Args:
        links: The cluster's links.
        nodes: [D, G] nodes of the D holders of each of G pieces.
        num_bytes: [G] bytes of each piece in total.
    """
    cluster, senders = links.cluster, np.sort(nodes, axis=0)
    receivers = np.concatenate((senders[1:], senders[:1]))
    message = num_bytes / len(nodes)
    bytes_per_s, carried_s = cluster.inter_node_bytes_per_s, links.carried_s(message)
    seconds = np.where(
        senders == receivers,
        _inside_s(links, senders, message),
        cluster.inter_node_latency_s + carried_s,
    )
    if links.special_links:
        lows, highs = np.minimum(senders, receivers), np.maximum(senders, receivers)
        names = lows * len(cluster.nodes) + highs
        for (low, high), (special_bytes_per_s, latency_s) in links.special_links.items():
            special_s = latency_s + carried_s * (bytes_per_s / special_bytes_per_s)
            is_it = names == low * len(cluster.nodes) + high
            seconds = np.where(is_it, special_s, seconds)
    slowest_s: FloatArray = seconds.max(axis=0)
    return (len(nodes) - 1) * slowest_s


def rings_inside_s(
    links: ClusterLinks, nodes: IntArray, num_ranks: IntArray, num_bytes: FloatArray
) -> FloatArray:
    """Return the seconds, [D, G], of each holder's all-gather in a ring on its own node.

    Args:
        links: The cluster's links.
        nodes: [D, G] the holders' nodes.
        num_ranks: [G] ranks of each ring.
        num_bytes: [G] bytes of each piece in total.
    """
    return (num_ranks - 1) * _inside_s(links, nodes, num_bytes / num_ranks)


def _inside_s(links: ClusterLinks, nodes: IntArray, num_bytes: FloatArray) -> FloatArray:
    """Return the seconds, [D, G], of a message of [G] bytes inside each of [D, G] nodes."""
    seconds: FloatArray = (
        links.inside_latency_s[nodes] + num_bytes / links.inside_bytes_per_s[nodes]
    )
    return seconds


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
    return _pairwise_s(
        (
            count,
            links.transfer_s(first[node], first[other], num_bytes),
            links.link(first[node], first[other])[1],
        )
        for other, count in counts.items()
    )


def _pairwise_s(messages: Iterable[tuple[int, float, float]]) -> float:
    """Return the seconds in which a rank sends each other rank its piece.

    Args:
        messages: For each kind: (number of messages, seconds of each, latency of each).
    """
    found = [item for item in messages if item[0]]
    latency_s = max((latency_s for _, _, latency_s in found), default=0.0)
    return latency_s + sum(count * (seconds - own_s) for count, seconds, own_s in found)
