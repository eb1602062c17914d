"""Judge plans under the schedule that will run: solve each pipeline's order, and simulate it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from lightning_hetero.core.actions import Action
from lightning_hetero.core.places import stages_by_worker, usual_held
from lightning_hetero.core.plan import ParallelPlan, StagePlan
from lightning_hetero.planner.memory import own_microbatches
from lightning_hetero.planner.result import PlanningResult
from lightning_hetero.schedules import (
    Edge,
    Schedule,
    ScheduleProblem,
    as_actions,
    end_s,
    order_1f1b,
    solve_in_rooms,
)
from lightning_hetero.simulator import CostModel, MicroBatchShape, Simulation, simulate
from lightning_hetero.simulator.work import PipelineWork

_MOST_RANKED = 16
"""How many of the candidates that are best under 1F1B are simulated under solved schedules."""
_MOST_FOLDED = 1024
"""Largest number of stages times micro-batches of a pipeline that is tried with chunks."""
Orders = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """A plan under the schedule that runs, beside 1F1B."""

    simulation: Simulation
    usual: Simulation
    """The simulation of the same plan under 1F1B."""
    orders: tuple[Orders | None, ...]
    """By pipeline; None where it runs 1F1B."""

    def __str__(self) -> str:
        solved = sum(order is not None for order in self.orders)
        if not solved:
            return "1F1B"
        gained = 1 - self.simulation.iteration_time_s / self.usual.iteration_time_s
        pairs = zip(
            (b for row in self.simulation.stage_memory_bytes for b in row),
            (b for row in self.usual.stage_memory_bytes for b in row),
            strict=True,
        )
        more = max(new - old for new, old in pairs) / 2**30
        return (
            f"solved for {solved} of {len(self.orders)} pipelines: {gained:.1%} less than 1F1B's "
            f"{self.usual.iteration_time_s:.4g} s, at most {max(more, 0):.1f} GiB more on a device"
        )


def simulate_scheduled(
    plan: ParallelPlan,
    cost: CostModel,
    batches: Sequence[Sequence[MicroBatchShape]],
    schedule: Schedule,
    **options: Any,
) -> Scheduled:
    """Solve the orders of a plan's pipelines, and simulate an iteration under them and under 1F1B.

    Args:
        plan: The plan.
        cost: Times and bytes.
        batches: For each pipeline its micro-batches.
        schedule: Which schedules may run.
        options: Other arguments of `simulate`.

    Raises:
        PlanError: Plan, model, cluster and micro-batches don't match.
    """
    usual = simulate(plan, cost, batches, **options)
    none: tuple[Orders | None, ...] = (None,) * plan.num_pipelines
    if not schedule.is_solved:
        return Scheduled(simulation=usual, usual=usual, orders=none)
    known: dict[ScheduleProblem, Orders | None] = {}
    orders = []
    for index, work in enumerate(batches):
        problem = _problem(plan, index, cost, work)
        if problem not in known:
            known[problem] = _solved(problem, max(map(sum, work), default=0), schedule)
        orders.append(known[problem])
    if not any(orders):
        return Scheduled(simulation=usual, usual=usual, orders=none)
    found = simulate(plan, cost, batches, orders=orders, **options)
    longest_s = usual.iteration_time_s * (1 - schedule.least_gain)
    if found.iteration_time_s > longest_s or (usual.fits and not found.fits):
        return Scheduled(simulation=usual, usual=usual, orders=none)
    return Scheduled(simulation=found, usual=usual, orders=tuple(orders))


def rank_scheduled(
    result: PlanningResult, cost: CostModel, schedule: Schedule
) -> tuple[PlanningResult, Scheduled]:
    """Return the candidates, the best under the schedule first, and the best one's orders."""
    if not schedule.is_solved:
        return result, Scheduled(
            simulation=result.best.simulation, usual=result.best.simulation, orders=()
        )
    judged = []
    for candidate in result.candidates[:_MOST_RANKED]:
        batches = own_microbatches(candidate.plan, result.workload.microbatch)
        best = None
        plans = [candidate.plan, _recomputing(candidate.plan)]
        if 2 * candidate.plan.max_stages * max(map(len, batches)) <= _MOST_FOLDED:
            plans += filter(None, [_folded(plan) for plan in plans])
        for found_plan in plans:
            found = simulate_scheduled(found_plan, cost, batches, schedule)
            judge = replace(candidate, plan=found_plan, simulation=found.simulation)
            is_better = best is None or judge.score(result.objective) < best[0].score(
                result.objective
            )
            if is_better and (best is None or found.simulation.fits):
                best = judge, found
        if best is not None:
            judged.append(best)
    judged.sort(key=lambda pair: pair[0].score(result.objective))
    return replace(result, candidates=tuple(item for item, _ in judged)), judged[0][1]


def _recomputing(plan: ParallelPlan) -> ParallelPlan:
    """Return the plan with all layers recomputed, so that stages hold more micro-batches."""

    def all_of(stage: StagePlan) -> StagePlan:
        whole = replace(stage, selective_layers=None, activation_budget_bytes=None)
        return replace(whole, recomputed_layers=len(stage.layers))

    pipelines = [replace(p, stages=tuple(map(all_of, p.stages))) for p in plan.pipelines]
    return replace(plan, pipelines=tuple(pipelines))


def _folded(plan: ParallelPlan) -> ParallelPlan | None:
    """Return the plan with pipelines in which each rank runs two stages of half its layers.

    A micro-batch goes from the rank of the last stage to that of the first, and back, so the head
    is on the rank of the last stage, whose layers leave time for it. None if all pipelines have one
    stage, or a stage has one layer, a budget of activations, or chunks already.
    """
    if plan.max_stages == 1:
        return None
    pipelines = []
    for pipeline in plan.pipelines:
        if pipeline.num_stages == 1:
            pipelines.append(pipeline)
            continue
        stages = pipeline.stages[::-1]
        budgets = [stage.activation_budget_bytes for stage in stages]
        if pipeline.has_chunks or any(budgets) or min(len(s.layers) for s in stages) == 1:
            return None
        parts = [_part(stage, len(stage.layers) // 2, is_first=True) for stage in stages]
        parts += [_part(stage, len(stage.layers) // 2, is_first=False) for stage in stages[::-1]]
        ends = list(accumulate((len(stage.layers) for stage in parts), initial=0))
        cut = zip(parts, pairwise(ends), strict=True)
        chunks = tuple(replace(stage, layers=range(*layers)) for stage, layers in cut)
        pipelines.append(replace(pipeline, stages=chunks))
    return replace(plan, pipelines=tuple(pipelines))


def _part(stage: StagePlan, count: int, *, is_first: bool) -> StagePlan:
    """Return the first `count` layers of a stage, or the others."""
    whole, selective = stage.recomputed_layers or 0, stage.selective_layers or 0
    layers, own = stage.layers[:count], min(whole, count)
    own_selective = min(selective, count - own)
    if not is_first:
        layers, own, own_selective = stage.layers[count:], whole - own, selective - own_selective
    said = stage.recomputed_layers is not None or stage.selective_layers is not None
    return replace(
        stage,
        layers=layers,
        recomputed_layers=own if said else None,
        selective_layers=own_selective if said else None,
    )


def _solved(problem: ScheduleProblem, longest: int, schedule: Schedule) -> Orders | None:
    """Return the orders of a pipeline, None where they gain nothing over 1F1B.

    Args:
        problem: The pipeline, with all the room there is.
        longest: Tokens of the longest micro-batch.
        schedule: What may run.
    """
    if problem.num_stages == 1 or not problem.num_microbatches:
        return None
    backward_s = tuple(
        tuple(map(sum, zip(*rows, strict=True)))
        for rows in zip(problem.input_s, problem.weight_s, strict=True)
    )
    nothing = tuple((0.0,) * len(row) for row in backward_s)
    whole = replace(problem, input_s=backward_s, weight_s=nothing, waiting_bytes=nothing)
    memory = [room / longest for room in problem.room_bytes]
    found = solve_in_rooms(
        replace(problem, room_bytes=tuple(most * longest for most in room))
        for room in schedule.rooms(memory, problem.workers)
    )
    if found.end_s >= end_s(whole, order_1f1b(whole)) * (1 - schedule.least_gain):
        return None
    return as_actions(found.orders)


def _problem(
    plan: ParallelPlan,
    index: int,
    cost: CostModel,
    work: Sequence[MicroBatchShape],
) -> ScheduleProblem:
    """Return what the order of a pipeline is solved for; activations are measured in tokens.

    A stage has at least room for the micro-batches that 1F1B holds.
    """
    pipeline, known = plan.pipelines[index], PipelineWork(plan, index, cost, work, None)
    pairs = [[cost.compute_s(shape, batch) for batch in work] for shape in known.shapes]
    weight_s = [tuple(cost.weight_s(shape, batch) for batch in work) for shape in known.shapes]
    longest, workers = max(map(sum, work), default=0), pipeline.workers
    # So many that activations, not buffers of the exchange, make the peak.
    count = max(1, len(work))
    few, many = (known.memory_holding([n * count * longest] * len(workers)) for n in (1, 2))
    rooms, shares = [], [1.0] * len(workers)
    for own, usual in zip(stages_by_worker(workers), usual_held(workers), strict=True):
        layers, first = [len(pipeline.stages[stage].layers) for stage in own], own[0]
        each = (many[first].total - few[first].total) / count
        left = cost.usable_bytes(known.shapes[first].device) - few[first].total
        room = count + left / each if each else count
        if any(pipeline.stages[stage].activation_budget_bytes is not None for stage in own):
            room = 0  # The budget is for as many as 1F1B holds.
        rooms.append(longest * max(room, usual))
        for stage, num_layers in zip(own, layers, strict=True):
            shares[stage] = num_layers / sum(layers)
    held_bytes = tuple(tuple(share * sum(batch) for batch in work) for share in shares)

    def edges(*, back: bool) -> tuple[Edge, ...]:
        hops = [pair[::-1] if back else pair for pair in pairwise(pipeline.stages)]
        return tuple(Edge(transfer_s=cost.activation_s(*hop, longest)) for hop in hops)

    return ScheduleProblem(
        forward_s=tuple(tuple(forward for forward, _ in row) for row in pairs),
        input_s=tuple(
            tuple(backward - own for (_, backward), own in zip(row, weights, strict=True))
            for row, weights in zip(pairs, weight_s, strict=True)
        ),
        weight_s=tuple(weight_s),
        forward_edges=edges(back=False),
        backward_edges=edges(back=True),
        held_bytes=held_bytes,
        waiting_bytes=held_bytes,
        room_bytes=tuple(rooms),
        workers=workers,
    )
