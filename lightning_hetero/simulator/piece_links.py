"""Seconds of many pieces' exchanges at once, as arrays: a search times thousands of plans.

The same times as those of `cluster_links`, one piece after another.
"""

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.simulator.cluster_links import ClusterLinks

__all__ = ["peer_rates", "rings_inside_s", "rings_s"]


def peer_rates(links: ClusterLinks, nodes: IntArray) -> tuple[FloatArray, FloatArray]:
    """Return for each holder the sum over its peers of 1 / bandwidth, and its largest latency.

    Linear in holders and links: peers on other nodes count at the cluster's rate, and the few links
    that differ correct that.

    Args:
        links: The cluster's links.
        nodes: [D, G] nodes of the D holders of each of G pieces, which exchange among themselves.

    Returns:
        Seconds per byte and seconds of latency, both [D, G].
    """
    cluster = links.cluster
    num_holders, num_pieces = nodes.shape
    size = num_pieces, len(cluster.nodes)
    columns = np.arange(num_pieces)
    places = (columns * size[1] + nodes).ravel()
    per_node = np.bincount(places, minlength=size[0] * size[1]).reshape(size)
    near = per_node[columns, nodes] - 1
    far = num_holders - 1 - near
    default_bytes_per_s = cluster.inter_node_bytes_per_s
    rate = far / default_bytes_per_s
    rate += near / links.inside_bytes_per_s[nodes]
    # Who has no such peers has no latency.
    latency = (near > 0) * links.inside_latency_s[nodes]
    for pair, (bytes_per_s, latency_s) in links.special_links.items():
        for node, peer in (pair, pair[::-1]):
            peers = (nodes == node) * per_node[:, peer]
            far -= peers
            rate += peers * (1 / bytes_per_s - 1 / default_bytes_per_s)
            np.maximum(latency, (peers > 0) * latency_s, out=latency)
    return rate, np.maximum(latency, (far > 0) * cluster.inter_node_latency_s)


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
    bytes_per_s, curve = cluster.inter_node_bytes_per_s, links.message_curve
    carried_s = message / bytes_per_s
    if curve is not None:
        carried_s = np.array([curve(size) for size in message.tolist()])
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
