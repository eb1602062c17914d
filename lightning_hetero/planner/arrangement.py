"""Where pipelines stand in the cluster, before layers and micro-batches are settled.

Devices of a node are interchangeable, so a stage is known by its node; ranks are dealt last.
"""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan

__all__ = ["Arrangement", "PipelineNodes", "classify_nodes", "to_plan"]


class PipelineNodes(NamedTuple):
    """One pipeline's stages by node."""

    tp_degree: int
    """Devices of each stage; all in the stage's node."""
    nodes: tuple[int, ...]
    """Node of every stage, first stage first."""


Arrangement = tuple[PipelineNodes, ...]
"""All pipelines; the devices that none names are idle."""


def classify_nodes(cluster: Cluster) -> tuple[int, ...]:
    """Return a class for each node; nodes of one class have equal devices and equal links.

    A node that a link to another node names is alone in its class.
    """
    linked = {index for link in cluster.links for index in link.nodes if len(set(link.nodes)) > 1}
    inside = {link.nodes[0]: link for link in cluster.links if len(set(link.nodes)) == 1}
    keys: dict[tuple[object, ...], int] = {}
    classes = []
    for index, node in enumerate(cluster.nodes):
        link = inside.get(index)
        key = (
            node.device,
            index if index in linked else None,
            (link.bytes_per_s, link.latency_s) if link else None,
        )
        classes.append(keys.setdefault(key, len(keys)))
    return tuple(classes)


def to_plan(
    layout: Arrangement,
    layers: Sequence[Sequence[int]],
    num_microbatches: Sequence[int | None],
    cluster: Cluster,
) -> ParallelPlan:
    """Deal ranks and return the plan.

    Args:
        layout: The pipelines' stages by node.
        layers: Layers of each stage, as [pipeline][stage].
        num_microbatches: Micro-batches of each pipeline; None leaves them open.
        cluster: The cluster whose nodes the layout names.
    """
    free = []
    first = 0
    for node in cluster.nodes:
        free.append(first)
        first += node.count
    stages: list[list[StagePlan]] = [[] for _ in layout]
    # Wide groups first: they then start at multiples of their width, as node topologies like it.
    for index in sorted(range(len(layout)), key=lambda i: -layout[i].tp_degree):
        tp_degree, nodes = layout[index]
        start = 0
        for node_index, count in zip(nodes, layers[index], strict=True):
            ranks = tuple(range(free[node_index], free[node_index] + tp_degree))
            free[node_index] += tp_degree
            stages[index].append(StagePlan(ranks=ranks, layers=range(start, start + count)))
            start += count
    return ParallelPlan(
        pipelines=tuple(
            PipelinePlan(stages=tuple(parts), num_microbatches=count)
            for parts, count in zip(stages, num_microbatches, strict=True)
        )
    )
