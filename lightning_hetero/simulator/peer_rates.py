"""How fast holders reach their peers: all pipelines and all groups of holders at once."""

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.simulator.cost import CostModel

__all__ = ["peer_rates"]


def peer_rates(cost: CostModel, nodes: IntArray) -> tuple[FloatArray, FloatArray]:
    """Return for each holder the sum over its peers of 1 / bandwidth, and its largest latency.

    Linear in holders and links: peers on other nodes count at the cluster's rate, and the few links
    that differ correct that.

    Args:
        cost: Says what links carry.
        nodes: [D, G] nodes of the D holders of each of G pieces, which exchange among themselves.

    Returns:
        Seconds per byte and seconds of latency, both [D, G].
    """
    cluster = cost.cluster
    num_holders, num_pieces = nodes.shape
    per_node = np.zeros((num_pieces, len(cluster.nodes)))
    columns = np.arange(num_pieces)
    np.add.at(per_node, (columns, nodes), 1.0)
    near = per_node[columns, nodes] - 1
    far = num_holders - 1 - near
    default_bytes_per_s = cluster.inter_node_bytes_per_s
    rate = far / default_bytes_per_s
    latency = np.zeros(nodes.shape)
    for pair, (bytes_per_s, latency_s) in cost.special_links.items():
        for node, peer in (pair, pair[::-1]):
            peers = np.where(nodes == node, per_node[:, peer], 0.0)
            far -= peers
            rate += peers * (1 / bytes_per_s - 1 / default_bytes_per_s)
            latency[peers > 0] = np.maximum(latency[peers > 0], latency_s)
    latency[far > 0] = np.maximum(latency[far > 0], cluster.inter_node_latency_s)
    inside = np.zeros((2, len(cluster.nodes)))
    for node in np.unique(nodes).tolist():
        bytes_per_s, latency_s = cluster.link_between(node, node)
        inside[:, node] = 1 / bytes_per_s, latency_s
    rate += near * inside[0][nodes]
    latency = np.where(near > 0, np.maximum(latency, inside[1][nodes]), latency)
    return rate, latency
