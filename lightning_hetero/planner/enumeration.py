"""Enumerate all arrangements of tiny clusters, and all groupings of few devices."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lightning_hetero.core.arrays import IntArray
from lightning_hetero.planner.arrangement import Arrangement, PipelineNodes
from lightning_hetero.planner.estimating.estimator import Estimator
from lightning_hetero.planner.solvers.patterns import enumerate_compositions

__all__ = ["PipelineUnits", "enumerate_arrangements", "every_grouping"]

PipelineUnits = tuple[int, tuple[int, ...]]
"""TP degree of a pipeline, and its number of tensor-parallel groups of each device type."""


def enumerate_arrangements(
    estimator: Estimator, counts: Sequence[int], tp_degrees: Sequence[int], limit: int
) -> list[Arrangement] | None:
    """Return all arrangements up to swapping equal nodes, or None if they are more than `limit`."""
    cluster = estimator.cost.cluster
    most_stages = estimator.num_layers
    most_pipelines = estimator.workload.num_microbatches
    pipelines = sorted(map(PipelineNodes.of_stages, _sequences(counts, tp_degrees, most_stages)))
    if len(pipelines) > limit:
        return None
    sizes = [(node.count, node.price_per_hour) for node in cluster.nodes]
    alike = [(estimator.classes[i], *sizes[i]) for i in range(len(sizes))]
    # Among arrangements that differ only by swapping equal nodes, the least in order uses the
    # first of these nodes first. So others are skipped.
    earlier = [
        next((j for j in reversed(range(i)) if alike[j] == alike[i]), None)
        for i in range(len(alike))
    ]
    found: dict[Arrangement, Arrangement] = {}
    num_visited = num_tried = 0
    stack: list[tuple[Arrangement, list[PipelineNodes], int, tuple[int, ...]]]
    stack = [((), pipelines, 0, tuple(counts))]
    while stack:
        arrangement, likely, start, free = stack.pop()
        if arrangement:
            found.setdefault(_relabel(arrangement, alike), arrangement)
        if len(arrangement) == most_pipelines:
            continue
        num_tried += len(likely) - start
        if num_visited > 8 * limit or num_tried > 64 * limit or len(found) > limit:
            return None
        # What has no room now has none later, either.
        rest = itertools.islice(likely, start, None)
        fitting = [p for p in rest if all(free[node] >= size for node, size in p.stages)]
        for index, pipeline in enumerate(fitting):
            left = list(free)
            in_order = True
            for node, tp_degree in pipeline.stages:
                before = earlier[node]
                in_order &= before is None or left[before] < counts[before]
                left[node] -= tp_degree
            if in_order and min(left) >= 0:
                num_visited += 1
                stack.append(((*arrangement, pipeline), fitting, index, tuple(left)))
    return list(found.values())


def _sequences(
    counts: Sequence[int], tp_degrees: Sequence[int], longest: int
) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield every sequence of stages as (node, TP degree) that fits into the nodes."""
    stack: list[tuple[tuple[tuple[int, int], ...], tuple[int, ...]]] = [((), tuple(counts))]
    while stack:
        stages, left = stack.pop()
        if stages:
            yield stages
        if len(stages) == longest:
            continue
        for node, tp_degree in itertools.product(range(len(counts)), tp_degrees):
            if tp_degree <= left[node]:
                rest = (*left[:node], left[node] - tp_degree, *left[node + 1 :])
                stack.append(((*stages, (node, tp_degree)), rest))


def _relabel(arrangement: Arrangement, alike: Sequence[object]) -> Arrangement:
    """Rename equal nodes by first appearance: a key that is equal for equivalent arrangements."""
    order = sorted(
        arrangement, key=lambda p: (p.tp_degrees, [str(alike[node]) for node in p.nodes])
    )
    free: dict[object, list[int]] = {}
    for node in reversed(range(len(alike))):
        free.setdefault(alike[node], []).append(node)
    names: dict[int, int] = {}
    renamed = []
    for pipeline in order:
        for node in pipeline.nodes:
            if node not in names:
                names[node] = free[alike[node]].pop()
        renamed.append(PipelineNodes(pipeline.tp_degrees, tuple(names[n] for n in pipeline.nodes)))
    return tuple(sorted(renamed))


def every_grouping(
    totals: Sequence[int],
    units: Mapping[int, Sequence[int]],
    *,
    most_stages: int,
    most_pipelines: int,
    most: int,
) -> list[tuple[PipelineUnits, ...]] | None:
    """Return every grouping of some or all devices; None if there are more than `most`.

    Args:
        totals: Devices of each type.
        units: For every TP degree of a pipeline, the groups of each type that nodes hold.
        most_stages: Most groups of a pipeline.
        most_pipelines: Most pipelines.
        most: Most groupings.
    """
    kinds: list[PipelineUnits] = []
    times = np.zeros(0, dtype=np.int64)
    for tp_degree, of_types in units.items():
        rows = enumerate_compositions(of_types, min(most_stages, sum(of_types)))
        kinds += [(tp_degree, tuple(row)) for row in rows.tolist()]
        fits = np.where(rows, np.array(totals) // np.maximum(rows * tp_degree, 1), most_pipelines)
        times = np.append(times, fits.min(axis=1))
        if _are_more(times, min(most_pipelines, max(totals)), most):
            return None
    found: list[tuple[PipelineUnits, ...]] = []
    stack: list[tuple[tuple[PipelineUnits, ...], int, tuple[int, ...]]] = [((), 0, tuple(totals))]
    while stack:
        chosen, start, left = stack.pop()
        if chosen:
            found.append(chosen)
        if len(found) + len(stack) > most:
            return None
        if len(chosen) == most_pipelines:
            continue
        for index in range(start, len(kinds)):
            tp_degree, row = kinds[index]
            rest = tuple([have - tp_degree * need for have, need in zip(left, row, strict=True)])
            if min(rest) >= 0:
                stack.append(((*chosen, kinds[index]), index, rest))
    return found


def _are_more(times: IntArray, most_pipelines: int, most: int) -> bool:
    """Return whether groupings are surely more than `most`.

    `times` says how many pipelines of each kind the devices suffice for. Any n pipelines of kinds
    that fit n times are a grouping.
    """
    for number in range(1, most_pipelines + 1):
        num_kinds = int(np.count_nonzero(times >= number))
        if not num_kinds:
            return False
        if math.comb(num_kinds + number - 1, number) > most:
            return True
    return False
