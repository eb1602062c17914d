"""Give pipelines micro-batches of unequal sizes if that shortens an iteration.

A fast device with much memory gains by larger micro-batches than a small one: it reads weights and
launches kernels less often per sample, while the small one would have to recompute. Starting from a
plan of one size, a step doubles or halves the size for all pipelines of a kind, deals the samples
out again, settles memory and simulates the plan. The best step is taken, as long as one gains.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.planner.estimating.memory_fit import own_microbatches, settle_memory
from lightning_hetero.planner.result import PlannedCandidate, PlanningResult
from lightning_hetero.planner.workload import (
    Objective,
    PlanningOptions,
    Workload,
    valid_tp_degrees,
)
from lightning_hetero.simulator import CostModel, Simulation, StageShape, simulate

__all__ = ["sizes_of", "with_unequal_sizes"]

_WORTH = 0.995
"""A step is taken if it shortens the iteration to this share of its seconds or less."""
_MOST_PIPELINES = 16
_MOST_STEPS = 12
_SIZES = (1, 2, 4, 8, 16, 32, 64)


def with_unequal_sizes(
    result: PlanningResult, cost: CostModel, options: PlanningOptions
) -> PlanningResult:
    """Return the result with sizes by pipeline in its best plan, if that is faster; else unchanged.

    Its bounds then hold for unequal sizes, too. The bound on seconds counts work alone: one
    pipeline may have the bubbles of one size, and another one the speed of another size.

    Args:
        result: Plans whose micro-batches all have one size.
        cost: Times and bytes.
        options: The options of their search.
    """
    if options.equal_microbatches:
        return result
    first = result.best
    # Nodes that only own would have to be paid for as well.
    idle_may_own = result.objective is Objective.THROUGHPUT
    best = _improved(first, _Sizes(cost, result.workload, idle_may_own=idle_may_own))
    if best is first:
        return result
    degrees = valid_tp_degrees(cost, result.workload, options)
    left = 1.0 - _most_gained_by_size(cost, result.workload, degrees)
    price = result.lower_bound_price
    return replace(
        result,
        candidates=(best, *result.candidates[1:]),
        lower_bound_s=_work_bound_s(cost, result.workload, degrees),
        lower_bound_price=None if price is None else left * price,
    )


def sizes_of(result: PlanningResult) -> str:
    """Return the samples of the best plan's micro-batches, such as "1 and 4"."""
    usual = result.workload.sequences_per_microbatch
    sizes = {pipeline.microbatch_size or usual for pipeline in result.best.plan.pipelines}
    return " and ".join(map(str, sorted(sizes)))


def _improved(candidate: PlannedCandidate, search: "_Sizes") -> PlannedCandidate:
    plan = candidate.plan
    if not 1 < plan.num_pipelines <= _MOST_PIPELINES or plan.host_owners:
        return candidate
    bare, best = search.bare(plan), candidate
    for _ in range(_MOST_STEPS):
        found = [(fitted, step) for step in search.steps(bare) if (fitted := search.fit(step))]
        if not found:
            break
        (sized, simulation), step = min(found, key=lambda pair: pair[0][1].iteration_time_s)
        if simulation.iteration_time_s > _WORTH * best.simulation.iteration_time_s:
            break
        bare, best = step, replace(candidate, plan=sized, simulation=simulation)
    return best


def _most_gained_by_size(cost: CostModel, workload: Workload, tp_degrees: Sequence[int]) -> float:
    """Return an upper bound on the share of a plan's seconds that other sizes can save.

    It is 1 minus the least ratio, over device types, degrees and ends of the model, of a sample's
    seconds with the best size to those with the workload's.
    """
    names = {node.device for node in cost.cluster.nodes}
    ratios = [1.0]
    for name, degree, (first, last) in itertools.product(
        names, tp_degrees, ((False, False), (True, False), (False, True))
    ):
        shape = StageShape(name, degree, 1, first, last)

        def sample_s(size: int, shape: StageShape = shape) -> float:
            return sum(cost.compute_s(shape, workload.microbatch[:1] * size)) / size

        usual_s = sample_s(workload.sequences_per_microbatch)
        sizes = [size for size in _SIZES if size <= workload.global_batch_size]
        ratios += [sample_s(size) / usual_s for size in sizes]
    return 1.0 - min(ratios)


def _work_bound_s(cost: CostModel, workload: Workload, tp_degrees: Sequence[int]) -> float:
    """Return the seconds of all layers on all devices at their best size and degree, no bubbles."""
    sizes = [size for size in _SIZES if size <= workload.global_batch_size]

    def layers_per_s(name: str) -> float:
        """Return layers of one sample that one device computes in a second, at most."""
        return max(
            size / degree / sum(cost.compute_s(shape, workload.microbatch[:1] * size))
            for degree, size in itertools.product(tp_degrees, sizes)
            for shape in [StageShape(name, degree, 1, False, False)]
        )

    speed = sum(node.count * layers_per_s(node.device) for node in cost.cluster.nodes)
    return workload.global_batch_size * cost.model.num_layers / speed


class _Sizes:
    """Steps from plan to plan, each fitted to memory and simulated."""

    def __init__(self, cost: CostModel, workload: Workload, *, idle_may_own: bool) -> None:
        self._cost, self._idle_may_own = cost, idle_may_own
        self._workload = workload

    def bare(self, plan: ParallelPlan) -> ParallelPlan:
        """Return a plan with the workload's size, without recomputation and owner shares."""
        size = self._workload.sequences_per_microbatch
        pipelines = [
            replace(
                pipeline,
                microbatch_size=size,
                stages=tuple(
                    replace(stage, recomputed_layers=None, selective_layers=None)
                    for stage in pipeline.stages
                ),
            )
            for pipeline in plan.pipelines
        ]
        return ParallelPlan(pipelines=tuple(pipelines))

    def fit(self, bare: ParallelPlan) -> tuple[ParallelPlan, Simulation] | None:
        """Return the fastest plan with settled memory, and its simulation; None if none fits."""
        cost, microbatch = self._cost, self._workload.microbatch
        found = []
        for plan in settle_memory(bare, cost, microbatch, idle_may_own=self._idle_may_own):
            simulation = simulate(plan, cost, own_microbatches(plan, microbatch))
            if simulation.fits:
                found.append((plan, simulation))
        return min(found, key=lambda pair: pair[1].iteration_time_s, default=None)

    def steps(self, plan: ParallelPlan) -> Iterator[ParallelPlan]:
        """Yield plans with another size for all pipelines of a kind and samples dealt out again."""
        shapes = [
            tuple(self._cost.shape_of(stage) for stage in pipeline.stages)
            for pipeline in plan.pipelines
        ]
        kinds = dict.fromkeys(shapes)
        for kind, factor in itertools.product(kinds if len(kinds) > 1 else (), (2.0, 0.5)):
            sizes = [
                (pipeline.microbatch_size or 1) * (factor if shape == kind else 1.0)
                for pipeline, shape in zip(plan.pipelines, shapes, strict=True)
            ]
            whole = [int(size) for size in sizes]
            if whole == sizes and max(whole) <= min(self._workload.global_batch_size, _SIZES[-1]):
                yield self._dealt(plan, shapes, whole)

    def _dealt(
        self, plan: ParallelPlan, shapes: Sequence[Sequence[StageShape]], sizes: Sequence[int]
    ) -> ParallelPlan:
        """Deal micro-batches to the pipeline that ends first; return `plan` if samples remain."""
        length = self._workload.microbatch[:1]
        times_s = [
            [sum(self._cost.compute_s(shape, length * size)) for shape in row]
            for row, size in zip(shapes, sizes, strict=True)
        ]
        ends_s = [sum(row) for row in times_s]
        counts, left = [0] * len(sizes), self._workload.global_batch_size
        while left:
            fitting = [index for index, size in enumerate(sizes) if size <= left]
            if not fitting:
                return plan  # The samples left are too few for a micro-batch.
            chosen = min(fitting, key=ends_s.__getitem__)
            ends_s[chosen] += max(times_s[chosen])
            counts[chosen] += 1
            left -= sizes[chosen]
        pipelines = [
            replace(pipeline, num_microbatches=count, microbatch_size=size)
            for pipeline, count, size in zip(plan.pipelines, counts, sizes, strict=True)
        ]
        return replace(plan, pipelines=tuple(pipelines))
