"""Seconds of messages over a cluster's links, and of collectives: in a ring, pairwise or by node.

For n ranks and S bytes in total, ring and pairwise move S·(n-1)/n out of each rank and as much in.
A ring pays n-1 latencies, one after another, and goes over every link of the ring; pairwise pays
one, as its messages are under way together. NCCL's trees serve all-reduces only, which an exchange
doesn't use.

"By node" (`runtime.exchange.by_node`), holders on one node first sum among themselves. With n
holders of S bytes, g of them on each node, each sends S·(g - 1)/g inside its node, and then a sum
to (n - g)/g holders on other nodes, S/n to each if sums are as wide as gradients.

A search times thousands of plans, so exchanges of many pieces are computed at once, as arrays of
[D, G]: D holders of each of G pieces, which exchange among themselves.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.core.cluster import Cluster


class ClusterLinks:
    """The links between the ranks of a cluster.

    Args:
        cluster: The cluster; its nodes' devices are the ranks, in their order.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
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
        return latency_s + num_bytes / bytes_per_s

    def all_reduce_s(self, ranks: Sequence[int], num_bytes: float) -> float:
        """Return the seconds of a ring all-reduce: a reduce-scatter and an all-gather.

        Each sends every rank's part over all links of the ring, the slowest of which counts.
        """
        if len(ranks) < 2:
            return 0.0
        # Links between the same two nodes are equally fast.
        links = {
            (self.node_of_rank[a], self.node_of_rank[b]): (a, b)
            for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True)
        }
        part = num_bytes / len(ranks)
        return 2 * (len(ranks) - 1) * max(self.transfer_s(a, b, part) for a, b in links.values())


class Peers:
    """What each holder of a piece exchanges with ranks of its own node and of others.

    So that the time is linear in holders, nodes and links, all peers on other nodes are counted at
    the cluster's rate first; then the few links with another rate are corrected.

    Args:
        links: The cluster's links.
        nodes: [D, G] nodes of D holders of each of G pieces.
        on_nodes: [G, nodes] how much each node's ranks exchange: a number of peers, or a share.
        own: [D, G, ranks] what the ranks of a holder's own stage have of that, which doesn't count.
        own_nodes: [D, G, ranks] the nodes of these ranks; None if they are the holders'.
    """

    def __init__(
        self,
        links: ClusterLinks,
        nodes: IntArray,
        on_nodes: FloatArray,
        own: FloatArray,
        own_nodes: IntArray | None = None,
    ) -> None:
        cluster, where = links.cluster, nodes[..., None] if own_nodes is None else own_nodes

        def others_on(node: IntArray | int) -> FloatArray:
            there = on_nodes[np.arange(nodes.shape[1]), node]
            at = node if isinstance(node, int) else node[..., None]
            left: FloatArray = np.maximum(there - ((where == at) * own).sum(axis=-1), 0.0)
            return left

        self.near = others_on(nodes)
        """[D, G] what peers on the same node exchange."""
        self.far: FloatArray = np.maximum(on_nodes.sum(axis=1) - own.sum(axis=-1) - self.near, 0.0)
        """[D, G] what peers on other nodes exchange."""
        usual, weighted = self.far.copy(), self.far.copy()
        # Holders without such peers have no latency.
        latency = (self.near > 0) * links.inside_latency_s[nodes]
        for pair, (bytes_per_s, latency_s) in links.special_links.items():
            for node, peer in (pair, pair[::-1]):
                there = (nodes == node) * others_on(peer)
                usual -= there
                weighted += there * (cluster.inter_node_bytes_per_s / bytes_per_s - 1)
                np.maximum(latency, (there > 0) * latency_s, out=latency)
        self._near_s = self.near / links.inside_bytes_per_s[nodes]
        self._far_s = weighted / cluster.inter_node_bytes_per_s
        self.latency_s = np.maximum(latency, (usual > 0) * cluster.inter_node_latency_s)
        """[D, G] the longest latency to a peer, if numbers of peers are given."""

    @classmethod
    def of_holders(cls, links: ClusterLinks, nodes: IntArray) -> "Peers":
        """Return the peers of holders that each exchange as much with every other one."""
        on_nodes = np.zeros((nodes.shape[1], len(links.cluster.nodes)))
        np.add.at(on_nodes, (np.arange(nodes.shape[1]), nodes), 1.0)
        return cls(links, nodes, on_nodes, np.ones((*nodes.shape, 1)))

    def carry_s(self, num_bytes: FloatArray) -> FloatArray:
        """Return the seconds, [D, G], in which holders exchange with all peers, without latency.

        Args:
            num_bytes: [D, G] bytes for each peer; or, if peers have shares, the bytes that are
                divided.
        """
        seconds: FloatArray = num_bytes * (self._near_s + self._far_s)
        return seconds


def rings_s(links: ClusterLinks, nodes: IntArray, num_bytes: FloatArray) -> FloatArray:
    """Return the seconds, [G], of a ring's all-gather or reduce-scatter of each piece.

    Holders are in the ring in the order of their nodes.

    Args:
        links: The cluster's links.
        nodes: [D, G] nodes of the D holders of each of G pieces.
        num_bytes: [G] bytes of each piece in total.
    """
    cluster, senders = links.cluster, np.sort(nodes, axis=0)
    receivers = np.concatenate((senders[1:], senders[:1]))
    message = num_bytes / len(nodes)
    bytes_per_s = cluster.inter_node_bytes_per_s
    carried_s = message / bytes_per_s
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
    """Return the seconds in which holders send each other their pieces, of `num_bytes` each."""
    nodes = np.array(links.node_of_rank)[[*ranks], None]
    peers = Peers.of_holders(links, nodes)
    pieces = np.full(nodes.shape, num_bytes / len(ranks))
    return float((peers.latency_s + peers.carry_s(pieces)).max())


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
    counts = np.bincount(np.array(links.node_of_rank)[[*ranks]], minlength=len(links.cluster.nodes))
    nodes = np.flatnonzero(counts)
    if len(nodes) in (1, len(ranks)):
        return push_straight_s(links, ranks, num_bytes)
    own, nothing = counts[nodes], np.zeros((1, len(nodes), 1))
    on_nodes = np.ceil(counts / own[:, None])
    on_nodes[np.arange(len(nodes)), nodes] = 0.0
    inside_s = (own > 1) * links.inside_latency_s[nodes]
    inside_s += (own - 1) / own * num_bytes / links.inside_bytes_per_s[nodes]
    between = Peers(links, nodes[None], on_nodes, nothing)
    pieces = np.full((1, len(nodes)), num_bytes / len(ranks) * width)
    return float(inside_s.max() + (between.latency_s + between.carry_s(pieces)).max())
