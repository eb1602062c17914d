"""Which node each stage of each group runs on (AutoHet §III-C, Algorithm 1 line 10).

Tensor parallelism stays inside a node. What bandwidth a node has left goes to data parallelism
first: the same stage of all pipelines is placed together (stage by stage), so gradients stay inside
nodes and hidden states cross them. The other order (pipeline by pipeline) keeps hidden states
inside and lets gradients cross. Slower devices take earlier stages: they hold more micro-batches at
once, and slower devices have memory to spare. Both are starting points that the simulator judges.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.planner.arrangement import Arrangement, PipelineNodes

__all__ = ["Group", "MappingOrder", "map_groups", "num_units"]


class MappingOrder(StrEnum):
    """What is kept inside nodes."""

    STAGES_TOGETHER = "stages-together"
    """The same stage of all pipelines: gradients."""
    PIPELINES_TOGETHER = "pipelines-together"
    """All stages of a pipeline: hidden states."""


class Group(NamedTuple):
    """A device group by types."""

    tp_degree: int
    """Devices of a unit."""
    devices: tuple[str, ...]
    """Device type of every stage, first stage first."""


def num_units(cluster: Cluster, counts: Sequence[int], device: str, tp_degree: int) -> int:
    """Return how many TP groups of a device type the nodes hold; none crosses nodes.

    `counts` are the devices of each node that may be used.
    """
    nodes = zip(cluster.nodes, counts, strict=True)
    return sum(count // tp_degree for node, count in nodes if node.device == device)


def map_groups(
    groups: Sequence[Group], cluster: Cluster, counts: Sequence[int], order: MappingOrder
) -> Arrangement | None:
    """Return a layout of the groups, in their order, or None if the nodes can't hold them.

    `counts` are the devices of each node that may be used.
    """
    free = list(counts)
    nodes_of: dict[str, list[int]] = {}
    for index, node in enumerate(cluster.nodes):
        nodes_of.setdefault(node.device, []).append(index)
    placed: list[list[int]] = [[-1] * len(group.devices) for group in groups]
    slots = [(g, s) for g, group in enumerate(groups) for s in range(len(group.devices))]
    if order is MappingOrder.STAGES_TOGETHER:
        slots.sort(key=lambda slot: (-groups[slot[0]].tp_degree, slot[1], slot[0]))
    else:
        slots.sort(key=lambda slot: (-groups[slot[0]].tp_degree, slot[0], slot[1]))
    for g, s in slots:
        tp_degree, devices = groups[g]
        candidates = nodes_of.get(devices[s], [])
        before = placed[g][s - 1] if s else -1
        # Nodes are filled one after the other; a full one is dropped from the front for good.
        while candidates and free[candidates[0]] < 1:
            candidates.pop(0)
        if order is MappingOrder.PIPELINES_TOGETHER and before in candidates[:8]:
            candidates = [before, *candidates]
        chosen = next((n for n in candidates if free[n] >= tp_degree), None)
        if chosen is None:
            return None
        free[chosen] -= tp_degree
        placed[g][s] = chosen
    return tuple(
        PipelineNodes(group.tp_degree, tuple(nodes))
        for group, nodes in zip(groups, placed, strict=True)
    )
