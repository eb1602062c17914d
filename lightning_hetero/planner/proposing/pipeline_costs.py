"""MaxLen and T(l, P) of a pipeline from sizes, memory and profiled times (Hydraulis Appendix B).

Memory is linear in the length of a micro-batch, so MaxLen is where it meets the capacity of the
tightest stage. Latency coefficients are fitted to the slowest stage's measured times, which decides
the pace of a pipeline of unequal stages. `plan_costs` says so of any plan by a cost model, also
one with unequal devices and layer splits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.assign.pipeline_cost import PipelineCost
from lightning_hetero.core.errors import AssignmentError
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan
from lightning_hetero.core.time_fit import TimeFit
from lightning_hetero.simulator.cost import CostModel

__all__ = [
    "StageMemory",
    "max_len",
    "pipeline_cost",
    "plan_costs",
    "util_len",
]

_MULTIPLE = 128
_SHORTEST = 128


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory of one rank of a stage."""

    capacity_bytes: float
    """Memory of the device less a safety margin."""
    state_bytes: float
    """Weights, gradients, optimizer states, embedding: whatever no token adds to."""
    bytes_per_token: float
    """Activations of one micro-batch per token, above 0."""
    num_in_flight: int
    """Micro-batches whose activations the stage holds at once: PP - stage_index under 1F1B."""

    @property
    def max_len(self) -> float:
        """Tokens of a micro-batch with which the stage is full; negative if it is already."""
        per_token = self.bytes_per_token * self.num_in_flight
        return (self.capacity_bytes - self.state_bytes) / per_token


def max_len(stages: Sequence[StageMemory]) -> int:
    """Return the most tokens that every stage can hold, a multiple of 128; 0 if none."""
    least = min(stage.max_len for stage in stages)
    return max(0, int(least) // _MULTIPLE * _MULTIPLE)


def util_len(fit: TimeFit, *, threshold: float = 0.85, limit: int) -> int:
    """Return the least length whose tokens per second reach `threshold` of the best's (App. C).

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


def pipeline_cost(
    lengths: ArrayLike,
    stage_times_s: ArrayLike,
    stages: Sequence[StageMemory],
) -> PipelineCost:
    """Return the cost of a pipeline from its stages' times and memory.

    Args:
        lengths: [M] tokens at which the stages were timed, at least two different ones.
        stage_times_s: [stages, M] seconds of a forward and backward of one such sequence.
        stages: What a rank of each stage holds.

    Raises:
        AssignmentError: The stages have no memory for tokens, times don't match the stages or
            aren't positive, or there are too few lengths.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    times_s = np.atleast_2d(np.asarray(stage_times_s, dtype=float))
    if len(times_s) != len(stages):
        raise AssignmentError(
            f"{len(times_s)} stages were timed but {len(stages)} have memory; describe the same."
        )
    limit = max_len(stages)
    if limit == 0:
        index = min(range(len(stages)), key=lambda i: stages[i].max_len)
        stage = stages[index]
        raise AssignmentError(
            f"Stage {index} keeps {stage.state_bytes / 2**30:.1f} GiB of states in "
            f"{stage.capacity_bytes / 2**30:.1f} GiB, which leaves room for less than 128 tokens. "
            "Use more stages or more tensor parallelism."
        )
    if times_s.shape[1:] != tokens.shape or len(np.unique(tokens)) < 2 or times_s.min() <= 0:
        raise AssignmentError(
            f"A fit of {tokens.size} lengths to {times_s[0].size} times needs two different "
            "lengths or more, and positive times. Profile at least two lengths."
        )
    slowest_s = times_s.max(axis=0)
    fit = TimeFit.of(
        [((int(n),), float(t)) for n, t in zip(tokens, slowest_s, strict=True)], needs_b=True
    )
    return PipelineCost(
        a=fit.a,
        b=fit.b,
        c=fit.c,
        max_len=limit,
        util_len=util_len(fit, limit=limit),
        num_stages=len(stages),
    )


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
    return tuple(
        _pipeline_cost(pipeline, model, lengths, plan.num_pipelines) for pipeline in plan.pipelines
    )


def _pipeline_cost(
    pipeline: PipelinePlan, model: CostModel, lengths: list[int], num_pipelines: int
) -> PipelineCost:
    shapes = [model.shape_of(stage) for stage in pipeline.stages]
    times_s = [[sum(model.compute_s(shape, (length,))) for length in lengths] for shape in shapes]
    longest = lengths[-1]
    stages = []
    for stage_index, shape in enumerate(shapes):
        num_in_flight = pipeline.num_stages - stage_index
        held = model.held_bytes(shape, longest)
        # Transient buffers and messages are of the one micro-batch that runs.
        passing = model.passing_bytes(shape, longest) / num_in_flight
        stages.append(
            StageMemory(
                capacity_bytes=model.usable_bytes(shape.device),
                state_bytes=model.fixed_bytes(shape, num_pipelines),
                bytes_per_token=(held + passing) / longest,
                num_in_flight=num_in_flight,
            )
        )
    return pipeline_cost(lengths, times_s, stages)
