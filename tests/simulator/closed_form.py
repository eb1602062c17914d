"""AutoHet's Eq. 1, the closed form beside the simulator."""

from collections.abc import Sequence

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.simulator import CostModel, MicroBatchShape
from lightning_hetero.simulator.exchange import ExchangeTable
from lightning_hetero.simulator.unit_times import Holders

__all__ = ["iteration_time_closed_form", "table_of"]


def table_of(plan: ParallelPlan, cost: CostModel) -> ExchangeTable:
    """Return the table of a plan's pipelines, each by itself."""
    return ExchangeTable([Holders.of([pipeline]) for pipeline in plan.pipelines], cost)


def iteration_time_closed_form(
    plan: ParallelPlan, cost: CostModel, microbatches: Sequence[Sequence[MicroBatchShape]]
) -> float:
    """Return AutoHet's Eq. 1: max over pipelines of Σ t_i + (K-1)·max t_i, plus T_sync.

    t_i is forward and backward of stage i with the message to the next stage and back. Where the
    micro-batches of a pipeline differ, the longest stands for all.
    """
    slowest = 0.0
    for pipeline, batches in zip(plan.pipelines, microbatches, strict=True):
        if not batches:
            continue
        stage_s = []
        for index, stage in enumerate(pipeline.stages):
            times = [sum(cost.compute_s(cost.shape_of(stage), batch)) for batch in batches]
            if index + 1 < pipeline.num_stages:
                after = pipeline.stages[index + 1]
                longest = max(sum(batch) for batch in batches)
                there, back = (
                    cost.activation_s(stage, after, longest),
                    cost.activation_s(after, stage, longest),
                )
                stage_s.append(max(times) + there + back)
            else:
                stage_s.append(max(times))
        slowest = max(slowest, sum(stage_s) + (len(batches) - 1) * max(stage_s))
    table = table_of(plan, cost)
    sync_s = 0.0
    for index, pipeline in enumerate(plan.pipelines):
        per_stage = [0.0] * pipeline.num_stages
        for segment, push, pull in zip(table.segments, table.push_s, table.pull_s, strict=True):
            per_stage[segment.stages[index]] += segment.num_units * (push[index] + pull[index])
        sync_s = max(sync_s, *per_stage)
    return slowest + sync_s
