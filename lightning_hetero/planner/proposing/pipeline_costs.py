"""Compute MaxLen and T(l, P) of a pipeline from its memory and times (Hydraulis Appendix B).

MaxLen is the longest micro-batch that every stage holds by the cost model, with micro-batches of
one length in flight (`sequence_room`). KeptLen is the longest one that no stage with a budget of
activations recomputes. Latency coefficients are fitted to the times of the slowest stage, which
decides the pace of a pipeline of unequal stages. `plan_costs` computes them for any plan by a cost
model, also with unequal devices and layer splits.
"""

import operator
from dataclasses import replace

import numpy as np

from lightning_hetero.assign.pipeline_cost import PipelineCost
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan
from lightning_hetero.core.profile import TimeFit
from lightning_hetero.planner.balancing import without_chunks
from lightning_hetero.planner.proposing.sequence_room import SequenceRoom
from lightning_hetero.simulator import CostModel

__all__ = ["plan_costs", "util_len"]

_SHORTEST = 128


def util_len(fit: TimeFit, *, threshold: float = 0.85, limit: int) -> int:
    """Return UtilLen: the least length with `threshold` of the best tokens per second (App. C).

    `l / (a·l² + b·l + c)` is best at `sqrt(c / a)`, or at `limit` if that is shorter, and reaches
    the threshold at the smaller root of `a·l² + (b - best time per token / threshold)·l + c`.
    """
    if fit.c == 0:
        return 1
    best_at = min(float(limit), np.sqrt(fit.c / fit.a) if fit.a > 0 else np.inf)
    slope_s = fit.b - (fit.a * best_at + fit.b + fit.c / best_at) / threshold
    discriminant = max(0.0, slope_s**2 - 4 * fit.a * fit.c)
    # The smaller root in the form that stays exact for a = 0.
    root = 2 * fit.c / (-slope_s + np.sqrt(discriminant))
    return int(min(max(1, np.ceil(root)), limit))


def plan_costs(
    plan: ParallelPlan, model: CostModel, *, context_length: int
) -> tuple[PipelineCost, ...]:
    """Return the cost of every pipeline of a plan.

    Args:
        plan: The plan.
        model: Times and bytes of its stages.
        context_length: Longest sequence that the coefficients are fitted for.

    Raises:
        AssignmentError: A stage has no memory for tokens.
    """
    longest = max(context_length, 2 * _SHORTEST)  # A fit needs two lengths.
    count = (longest // _SHORTEST).bit_length()
    lengths = sorted({*(_SHORTEST << i for i in range(count)), longest})
    pipelines = map(without_chunks, plan.pipelines)
    return tuple(_pipeline_cost(item, model, lengths, plan.num_pipelines) for item in pipelines)


def _pipeline_cost(
    pipeline: PipelinePlan, model: CostModel, lengths: list[int], num_pipelines: int
) -> PipelineCost:
    room = SequenceRoom(pipeline, model, num_pipelines)
    shapes = [model.shape_of(stage) for stage in pipeline.stages]
    times_s = [[sum(model.compute_s(shape, (length,))) for length in lengths] for shape in shapes]
    slowest_s = np.max(times_s, axis=0).tolist()
    samples = [((length,), seconds) for length, seconds in zip(lengths, slowest_s, strict=True)]
    fit = TimeFit.of(samples, needs_b=True)
    max_len, kept_len = room.max_len(), room.kept_len()
    found = PipelineCost(
        a=fit.a,
        b=fit.b,
        c=fit.c,
        max_len=kept_len,
        util_len=util_len(fit, limit=kept_len),
        num_stages=len(shapes),
    )
    if kept_len >= min(lengths[-1], max_len):
        return found  # No sequence needs more.
    shares = [0.0]
    for index, length in enumerate(lengths):
        if length > kept_len:
            stages_s = [row[index] for row in times_s]
            again_s = room.recompute_s(length)
            longer = max(map(operator.add, stages_s, again_s)) / max(stages_s) - 1.0
            shares.append(longer / (1.0 - kept_len / length))
    return replace(found, max_len=max_len, kept_len=kept_len, recompute_share=max(shares))
