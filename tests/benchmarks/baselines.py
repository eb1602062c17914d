"""What Megatron-LM and Whale can be set to, each at its best: symmetric plans by brute force.

Both take ranks in node order, tensor parallelism innermost, then data, then pipeline parallelism,
and the same number of stages and the same layer split in every pipeline. Megatron-LM cuts layers
and micro-batches evenly; Whale gives a pipeline micro-batches by its power and, in the second
variant, cuts layers by the power of the stages, one split for all pipelines.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
from lightning_hetero.planner.balancing import balance_layers
from lightning_hetero.simulator import CostModel, StageShape, simulate

MicroBatch = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What a system adapts to unequal devices."""

    microbatches_by_power: bool = False
    layers_by_power: bool = False


MEGATRON = Baseline()
WHALE = Baseline(microbatches_by_power=True)
WHALE_WITH_LAYERS = Baseline(microbatches_by_power=True, layers_by_power=True)


def best_time_s(
    baseline: Baseline, cost: CostModel, microbatch: MicroBatch, num_microbatches: int
) -> float:
    """Return the seconds of the system's best plan that fits, infinite if none does."""
    times = [
        time_s(plan, cost, microbatch)
        for plan in symmetric_plans(baseline, cost, microbatch, num_microbatches)
    ]
    return min(times, default=float("inf"))


def time_s(plan: ParallelPlan, cost: CostModel, microbatch: MicroBatch) -> float:
    """Return the seconds of a plan, infinite if its memory doesn't suffice."""
    batches = [[microbatch] * (p.num_microbatches or 0) for p in plan.pipelines]
    simulation = simulate(plan, cost, batches)
    for pipeline, row in zip(plan.pipelines, simulation.stage_memory_bytes, strict=True):
        for stage, needed in zip(pipeline.stages, row, strict=True):
            if needed > cost.usable_bytes(cost.shape_of(stage).device):
                return float("inf")
    return simulation.iteration_time_s


def symmetric_plans(
    baseline: Baseline, cost: CostModel, microbatch: MicroBatch, num_microbatches: int
) -> Iterator[ParallelPlan]:
    """Yield the system's plan for every (TP, DP, PP) that uses all devices."""
    counts = [node.count for node in cost.cluster.nodes]
    world_size, model = sum(counts), cost.model
    for tp in range(1, min(counts) + 1):
        if any(count % tp for count in counts) or model.num_heads % tp:
            continue
        units = [tuple(range(first, first + tp)) for first in range(0, world_size, tp)]
        for pp in range(1, len(units) + 1):
            if len(units) % pp or pp > model.num_layers:
                continue
            dp = len(units) // pp
            if dp > num_microbatches:
                continue
            ranks = [[units[stage * dp + replica] for stage in range(pp)] for replica in range(dp)]
            layers = _layers(baseline, cost, microbatch, ranks)
            counts_of = _share(baseline, cost, microbatch, (ranks, layers), num_microbatches)
            if layers is not None and counts_of is not None:
                yield build(ranks, [layers] * dp, counts_of)


def build(
    ranks: Sequence[Sequence[tuple[int, ...]]],
    layers: Sequence[Sequence[int]],
    num_microbatches: Sequence[int],
) -> ParallelPlan:
    """Return the plan of [pipeline][stage] ranks and layers."""
    pipelines = []
    for row, split, count in zip(ranks, layers, num_microbatches, strict=True):
        stops = np.cumsum(split).tolist()
        stages = tuple(
            StagePlan(ranks=own, layers=range(stop - size, stop))
            for own, size, stop in zip(row, split, stops, strict=True)
        )
        pipelines.append(PipelinePlan(stages=stages, num_microbatches=count))
    return ParallelPlan(pipelines=tuple(pipelines))


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return layers per stage, one apart at most."""
    cuts = [num_layers * index // num_stages for index in range(num_stages + 1)]
    return tuple(b - a for a, b in itertools.pairwise(cuts))


def stage_times_s(
    cost: CostModel, ranks: tuple[int, ...], microbatch: MicroBatch
) -> tuple[float, ...]:
    """Return seconds of a micro-batch on these ranks with 0, 1, ... layers, without ends."""
    device = cost.cluster.device_of(ranks[0]).name
    link = cost.link(ranks[0], ranks[-1]) if len(ranks) > 1 else None
    counts = range(1, cost.model.num_layers + 1)
    shapes = [StageShape(device, len(ranks), count, link=link) for count in counts]
    return (0.0, *(sum(cost.compute_s(shape, microbatch)) for shape in shapes))


def _layers(
    baseline: Baseline,
    cost: CostModel,
    microbatch: MicroBatch,
    ranks: Sequence[Sequence[tuple[int, ...]]],
) -> tuple[int, ...] | None:
    num_layers, num_stages = cost.model.num_layers, len(ranks[0])
    if not baseline.layers_by_power:
        return even_layers(num_layers, num_stages)
    slowest = []
    for stage in range(num_stages):
        times = np.max([stage_times_s(cost, row[stage], microbatch) for row in ranks], axis=0)
        fits = min(_most_layers(cost, row, stage, microbatch) for row in ranks)
        times[fits + 1 :] = np.inf
        slowest.append(times)
    return balance_layers(slowest, num_layers)


def _share(
    baseline: Baseline,
    cost: CostModel,
    microbatch: MicroBatch,
    stages: tuple[Sequence[Sequence[tuple[int, ...]]], tuple[int, ...] | None],
    total: int,
) -> list[int] | None:
    """Return micro-batches per pipeline: equal, or each to the one that would end it first."""
    ranks, layers = stages
    if layers is None:
        return None
    if not baseline.microbatches_by_power:
        # Megatron-LM needs equal numbers; a batch that replicas don't divide can't be run.
        return [total // len(ranks)] * len(ranks) if total % len(ranks) == 0 else None
    slowest = [
        max(
            stage_times_s(cost, own, microbatch)[count]
            for own, count in zip(row, layers, strict=True)
        )
        for row in ranks
    ]
    counts = [1] * len(ranks)
    for _ in range(total - len(ranks)):
        first = min(range(len(ranks)), key=lambda j: (counts[j] + 1) * slowest[j])
        counts[first] += 1
    return counts


def _most_layers(
    cost: CostModel, row: Sequence[tuple[int, ...]], stage: int, microbatch: MicroBatch
) -> int:
    """Return how many layers fit into a stage with its micro-batches in flight."""
    device = cost.cluster.device_of(row[stage][0]).name
    held = len(row) - stage
    ends = {"has_embedding": stage == 0, "has_head": stage == len(row) - 1}
    most = 0
    for count in range(1, cost.model.num_layers + 1):
        shape = StageShape(device, len(row[stage]), count, **ends)
        memory = cost.stage_memory(shape, 1, [microbatch] * held, held)
        if memory.total > cost.usable_bytes(device):
            break
        most = count
    return most
