"""Every layout of a cluster, to see what a search missed; `bench_search` compares them.

A layout says how many TP groups of each device type each pipeline has, with devices left idle or
not, in which order the types stand in all pipelines (slowest or fastest first) and which traffic
stays inside nodes. Layers and micro-batches follow from it as in the search. All are estimated, and
simulated are those whose estimates are so near the best that they could be better than it.
"""

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_hetero.planner import PlanningOptions, Workload
from lightning_hetero.planner.columns import Column
from lightning_hetero.planner.judge import Candidate, Judge, Pipeline
from lightning_hetero.planner.pace import deal
from lightning_hetero.planner.placement import MappingOrder, Option, place
from lightning_hetero.planner.stages import Ownership, Stages
from lightning_hetero.planner.workload import valid_tp_degrees
from tests.benchmarks.search_laws import Task

PipelineUnits = tuple[int, tuple[int, ...]]
"""TP degree of a pipeline, and its number of tensor-parallel groups of each class of nodes."""
DEVICES = ("A100-80GB", "H800-80GB", "V100-32GB", "RTX-4090", "T4", "A10-24GB")
_SLACK = 0.97
"""The least time of a layout, and its estimate, are taken to be so much less, in case they aren't
quite bounds."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a search found, and the best of every layout."""

    found_s: float
    """Iteration time of the best plan that the search found."""
    best_s: float
    """The same, or the simulated iteration time of the best layout if that is less."""

    @property
    def above(self) -> float:
        """The share by which the best plan is slower than the best layout."""
        return self.found_s / self.best_s - 1

    @property
    def missed(self) -> bool:
        """Whether the best layout is better than all that the search simulated."""
        return self.above > 1e-6


def compare(task: Task, most: int) -> Comparison | None:
    """Compare the search with every layout; None if there are more than `most`, or none fits."""
    cost = task.cost()
    degrees = valid_tp_degrees(cost, task.workload, PlanningOptions(tp_degrees=task.tp_degrees))
    size = task.workload.sequences_per_microbatch
    stages = Stages(cost, task.workload, degrees)
    groupings = _groupings(stages, degrees, most)
    if groupings is None or task.best_s == float("inf"):
        return None
    judge, near = Judge({size: stages}), []
    for number, groups in enumerate(every_layout(stages, groupings)):
        if number == most:
            return None
        estimate = _estimate(judge, groups)
        if estimate is not None and estimate[0] * _SLACK <= task.best_s:
            near.append(estimate)
    return Comparison(
        found_s=task.best_s,
        best_s=_best_s(judge, sorted(near, key=lambda item: item[0]), task.best_s),
    )


def small_tasks() -> Iterator[Task]:
    """Yield random tasks of 8 to 64 devices, always the same."""
    shapes = (
        ((4, 2), (4, 2)), ((8, 1), (4, 1)), ((8, 1),), ((4, 1), (2, 2), (2, 1)), ((8, 2),),
        ((8, 1), (8, 1)), ((8, 2), (8, 1)), ((8, 4),), ((8, 8),), ((8, 2), (8, 2)),
        ((8, 4), (8, 4)), ((4, 4), (8, 2)),
    )  # fmt: skip
    choose = random.Random(0)
    while True:
        shape, degrees = choose.choice(shapes), choose.choice([None, (2,), (4,), (4, 8), (8,)])
        if degrees and max(degrees) > min(count for count, _ in shape):
            continue
        names = choose.sample(DEVICES, len(shape))
        yield Task(
            nodes=tuple((n, c) for n, (c, k) in zip(names, shape, strict=True) for _ in range(k)),
            model="llama-7b" if degrees else choose.choice(["bert-large", "gpt-neo-2.7b"]),
            workload=Workload(
                sequence_length=choose.choice([512, 2048]),
                global_batch_size=choose.choice([32, 64, 256]),
            ),
            bytes_per_s=choose.choice([1.25e9, 12.5e9, 50e9]),
            tp_degrees=degrees,
        )


def _groupings(
    stages: Stages, tp_degrees: Sequence[int], most: int
) -> list[tuple[PipelineUnits, ...]] | None:
    """Return all groupings of the cluster's devices by class, or None if there are over `most`."""
    rows = stages.counts_of_class.values()
    return every_grouping(
        [sum(counts) for counts in rows],
        {tp: [sum(count // tp for count in counts) for counts in rows] for tp in tp_degrees},
        most_stages=stages.num_layers,
        most_pipelines=stages.workload.num_microbatches,
        most=most,
    )


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
    kinds = [
        (tp_degree, row)
        for tp_degree, of_types in units.items()
        for row in itertools.product(*(range(count + 1) for count in of_types))
        if 0 < sum(row) <= most_stages
    ]
    takes = [np.array([tp_degree * need for need in row]) for tp_degree, row in kinds]
    times = np.array([(np.array(totals)[row > 0] // row[row > 0]).min() for row in takes])
    for number in range(1, min(most_pipelines, max(totals)) + 1):
        # Any n pipelines of kinds for which devices suffice n times are a grouping.
        num_kinds = int((times >= number).sum())
        if num_kinds and math.comb(num_kinds + number - 1, number) > most:
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
            rest = tuple(
                [have - need for have, need in zip(left, takes[index].tolist(), strict=True)]
            )
            if min(rest) >= 0:
                stack.append(((*chosen, kinds[index]), index, rest))
    return found


def every_layout(
    stages: Stages, groupings: Sequence[tuple[PipelineUnits, ...]]
) -> Iterator[list[tuple[Option, ...]]]:
    """Yield all layouts of groupings: classes slowest first in all pipelines, or fastest first."""
    kinds = list(stages.counts_of_class)
    slowness = [stages.times_s(Option(kind, 1), False, False)[:, 1].sum() for kind in kinds]
    order = sorted(range(len(kinds)), key=lambda index: -slowness[index])
    for chosen in groupings:
        found: dict[tuple[tuple[Option, ...], ...], None] = {}
        for direction in (order, order[::-1]):
            pipelines = (
                tuple(Option(kinds[i], tp) for i in direction for _ in range(row[i]))
                for tp, row in chosen
            )
            found[tuple(pipelines)] = None
        yield from map(list, found)


def _estimate(
    judge: Judge, options: Sequence[tuple[Option, ...]]
) -> tuple[float, list[Candidate]] | None:
    """Return the seconds of a layout, and it with layers, micro-batches and nodes; None if not."""
    size, stages = judge.workload.sequences_per_microbatch, judge.any_stages
    found: tuple[float, list[Candidate]] | None = None
    for by_room in (False, True):
        ownership = Ownership(len(options), by_room)
        times = judge.times(size, ownership, MappingOrder.STAGES_TOGETHER)
        layers = [times.balance(row) for row in options]
        if None in layers:
            continue
        columns = [Column(*pair, size) for pair in zip(options, layers, strict=True)]
        rates = [times.rate(column) for column in columns]
        sizes = (size,) * len(options)
        counts = deal(rates, sizes, judge.workload.global_batch_size)
        if counts is None:
            continue
        placed = (place(options, stages.class_of_node, stages.counts, o) for o in MappingOrder)
        candidates = [
            tuple(map(Pipeline, item, layers, sizes, counts)) for item in placed if item is not None
        ]
        seconds = max(r.fill_s + r.slope_s * k for r, k in zip(rates, counts, strict=True))
        if candidates and (found is None or seconds < found[0]):
            found = seconds, candidates
    return found


def _best_s(
    judge: Judge, estimates: Sequence[tuple[float, list[Candidate]]], found_s: float
) -> float:
    """Return the least simulated seconds, or what was found if none are less."""
    best_s = found_s
    for estimate_s, candidates in estimates:
        if estimate_s * _SLACK > best_s:
            break
        best_s = min([best_s, *map(judge.seconds, candidates)])
    return best_s
