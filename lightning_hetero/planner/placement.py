"""Place pipelines on the nodes of a cluster.

Devices of a node are interchangeable, so a stage is described by its node; ranks are assigned last.

`place` decides which node each stage of each pipeline runs on (AutoHet §III-C, Algorithm 1 line
10). Tensor parallelism stays inside a node. One order favours data parallelism: it places the same
stage of all pipelines together (stage by stage), so gradients stay inside nodes and activations
cross between nodes. The other order (pipeline by pipeline) keeps activations inside nodes, and
gradients cross. The simulator judges both.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan


class Option(NamedTuple):
    """One way to run a stage: on which class of nodes, on how many of a node's devices."""

    node_class: int
    tp_degree: int


PlacedStages = tuple[tuple[int, int], ...]
"""(node, TP degree) of every stage of a pipeline, first stage first."""
Arrangement = tuple[PlacedStages, ...]
"""All pipelines; devices in none of them are idle."""


def share_nodes(stages: PlacedStages) -> tuple[bool, ...]:
    """Return for each two consecutive stages whether they share a node."""
    return tuple([one[0] == other[0] for one, other in itertools.pairwise(stages)])


def classify_nodes(cluster: Cluster) -> tuple[int, ...]:
    """Return a class for each node; nodes of one class have equal devices and equal links.

    A node that has a special link to another node is alone in its class.
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
    arrangement: Arrangement,
    layers: Sequence[Sequence[int]],
    num_microbatches: Sequence[int | None],
    cluster: Cluster,
    *,
    sizes: Sequence[int | None] | None = None,
) -> ParallelPlan:
    """Assign ranks to the stages and return the plan.

    Args:
        arrangement: The pipelines' stages by node.
        layers: Layers of each stage, as [pipeline][stage].
        num_microbatches: Micro-batches of each pipeline; None leaves them open.
        cluster: The cluster whose nodes the arrangement names.
        sizes: Samples of each pipeline's micro-batches; None leaves them to the workload.
    """
    free = []
    first = 0
    for node in cluster.nodes:
        free.append(first)
        first += node.count
    slots = [
        (-tp_degree, index, stage, node)
        for index, pipeline in enumerate(arrangement)
        for stage, (node, tp_degree) in enumerate(pipeline)
    ]
    ranks: dict[tuple[int, int], tuple[int, ...]] = {}
    # Wide groups first: they then start at multiples of their width, which suits node topologies.
    for negative_degree, index, stage, node_index in sorted(slots):
        stop = free[node_index] - negative_degree
        ranks[index, stage] = tuple(range(free[node_index], stop))
        free[node_index] = stop
    pipelines = []
    own = sizes or [None] * len(layers)
    for index, (row, count, size) in enumerate(zip(layers, num_microbatches, own, strict=True)):
        stops = itertools.accumulate(row)
        stages = tuple(
            StagePlan(ranks=ranks[index, stage], layers=range(stop - number, stop))
            for stage, (number, stop) in enumerate(zip(row, stops, strict=True))
        )
        pipelines.append(PipelinePlan(stages=stages, num_microbatches=count, microbatch_size=size))
    return ParallelPlan(pipelines=tuple(pipelines))


class MappingOrder(StrEnum):
    """The order in which stages are placed, by what it keeps together on a node."""

    STAGES_TOGETHER = "stages-together"
    """The same stage of all pipelines: gradients stay inside nodes."""
    PIPELINES_TOGETHER = "pipelines-together"
    """All stages of a pipeline: activations stay inside nodes."""
    APART = "apart"
    """Like STAGES_TOGETHER, but columns assume that every activation leaves its node: in a mix of
    unlike pipelines most do."""


def place(
    pipelines: Sequence[Sequence[Option]],
    classes: Sequence[int],
    counts: Sequence[int],
    order: MappingOrder,
) -> Arrangement | None:
    """Return an arrangement of pipelines, in their order, or None if the nodes can't hold them.

    For STAGES_TOGETHER a stage takes the largest node that has room: first stages first, or the
    widest ones if nodes can't hold all pipelines otherwise. For PIPELINES_TOGETHER the widest
    pipelines come first, and a stage stays on the node of the previous stage. If there is no room,
    it takes the node that it and the following stages of its class fill best, or the node with the
    most room.

    Args:
        pipelines: Class of nodes and TP degree of every stage.
        classes: Class of every node.
        counts: Devices of every node.
        order: What to keep together.
    """
    nodes_of: dict[int, list[int]] = {}
    for node in sorted(range(len(counts)), key=lambda node: -counts[node]):
        nodes_of.setdefault(classes[node], []).append(node)
    if order is MappingOrder.PIPELINES_TOGETHER:
        found = _pipelines_together(pipelines, nodes_of, list(counts))
    else:
        found = _stages_together(pipelines, nodes_of, list(counts), wide_first=False)
        found = found or _stages_together(pipelines, nodes_of, list(counts), wide_first=True)
    if found is None:
        return None
    return tuple(
        tuple((node, option.tp_degree) for node, option in zip(nodes, options, strict=True))
        for nodes, options in zip(found, pipelines, strict=True)
    )


def _stages_together(
    pipelines: Sequence[Sequence[Option]],
    nodes_of: dict[int, list[int]],
    free: list[int],
    *,
    wide_first: bool,
) -> list[list[int]] | None:
    slots = [(p, s, *option) for p, row in enumerate(pipelines) for s, option in enumerate(row)]
    slots.sort(key=lambda slot: (-slot[3] * wide_first, slot[1], -slot[3]))
    placed, first = [[-1] * len(row) for row in pipelines], dict.fromkeys(nodes_of, 0)
    for p, s, kind, tp_degree in slots:
        candidates = nodes_of.get(kind, [])
        # Nodes are filled one after another; full ones at the front are passed over for good.
        while first.get(kind, 0) < len(candidates) and not free[candidates[first[kind]]]:
            first[kind] += 1
        open_nodes = itertools.islice(candidates, first.get(kind, 0), None)
        chosen = next((node for node in open_nodes if free[node] >= tp_degree), None)
        if chosen is None:
            return None
        free[chosen] -= tp_degree
        placed[p][s] = chosen
    return placed


def _pipelines_together(
    pipelines: Sequence[Sequence[Option]], nodes_of: dict[int, list[int]], free: list[int]
) -> list[list[int]] | None:
    placed = [[-1] * len(row) for row in pipelines]
    degrees = [[option.tp_degree for option in row] for row in pipelines]
    wide_first = sorted(range(len(pipelines)), key=lambda p: (-max(degrees[p]), -sum(degrees[p])))
    for p in wide_first:
        options, chosen = pipelines[p], -1
        for s, (kind, tp_degree) in enumerate(options):
            near = s and options[s - 1].node_class == kind and free[chosen] >= tp_degree
            if not near:
                needed = sum(degree for of, degree in options[s:] if of == kind)
                room = [node for node in nodes_of.get(kind, []) if free[node] >= tp_degree]
                if not room:
                    return None
                holding = [node for node in room if free[node] >= needed]
                chosen = (
                    min(holding, key=free.__getitem__)
                    if holding
                    else max(room, key=free.__getitem__)
                )
            free[chosen] -= tp_degree
            placed[p][s] = chosen
    return placed


def without_chunks(pipeline: PipelinePlan) -> PipelinePlan:
    """Return a pipeline with all layers of the same ranks in one stage, as estimates see it."""
    if not pipeline.has_chunks:
        return pipeline
    stages, stop = [], 0
    for group in pipeline.groups:
        own = [stage for stage in pipeline.stages if stage.ranks == group]
        start, stop = stop, stop + sum(len(stage.layers) for stage in own)
        given = {
            name: sum(getattr(stage, name) or 0 for stage in own) or None
            for name in own[0].recomputation
        }
        stages.append(StagePlan(ranks=group, layers=range(start, stop), **given))
    return replace(pipeline, stages=tuple(stages))
