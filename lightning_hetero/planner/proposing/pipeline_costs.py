"""Compute what a plan's pipelines cost samples of any length (Hydraulis Appendix B and C).

The memory of a pipeline limits the tokens of its micro-batches: with MaxLen tokens each, every
stage can just hold all that it has in flight. A stage may have a budget of B bytes for activations
and recompute what exceeds it. Let it have n layers and W micro-batches of T tokens in flight; let a
layer take K bytes per token, or R if it is recomputed. Then the stage

- recomputes nothing up to T' = B / (W·n·K) tokens. KeptLen is the least T' of all stages;
- recomputes n·K / (K - R)·(1 - T' / T) layers if T is larger;
- fails if not even the inputs of all layers fit beside one layer that is being recomputed, that is
  if W·T·n·R + T·(K - R) > B.

The slowest stage decides a pipeline's pace, so latency coefficients are fitted to its times.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from lightning_hetero.assign.pipeline_cost import NEVER_RECOMPUTED, PipelineCost
from lightning_hetero.core.errors import AssignmentError
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan
from lightning_hetero.core.profile import TimeFit
from lightning_hetero.planner.placement import without_chunks
from lightning_hetero.simulator import CostModel, StageShape

_MULTIPLE = 128
"""Lengths are counted in multiples of so many tokens."""
_MOST_TOKENS = 2**40


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
    longest = max(context_length, 2 * _MULTIPLE)  # A fit needs two lengths.
    count = (longest // _MULTIPLE).bit_length()
    lengths = sorted({*(_MULTIPLE << i for i in range(count)), longest})
    known: dict[tuple[_Stage, ...], PipelineCost] = {}
    found = []
    for pipeline in plan.pipelines:
        room = PipelineRoom(pipeline, model, plan.num_pipelines)
        if room.stages not in known:
            known[room.stages] = room.cost(lengths)
        found.append(known[room.stages])
    return tuple(found)


def with_budgets(plan: ParallelPlan, cost: CostModel, longest: int) -> ParallelPlan:
    """Return a plan whose pipelines recompute where that lets them take longer sequences.

    Args:
        plan: A plan whose stages name no recomputation.
        cost: Times and bytes.
        longest: Tokens of the longest sequence.
    """
    rooms = [PipelineRoom(pipeline, cost, plan.num_pipelines) for pipeline in plan.pipelines]
    return replace(plan, pipelines=tuple(room.with_budgets(longest) for room in rooms))


@dataclass(frozen=True)
class _Stage:
    """All that a stage's memory depends on besides the tokens of its micro-batches."""

    shape: StageShape
    num_in_flight: int
    budget_bytes: float | None
    """Budget of its activations, multiplied like all bytes here by the correction factor."""


class PipelineRoom:
    """How many tokens the micro-batches of a pipeline may have, and what they take.

    Args:
        pipeline: Its stages' `recomputed_layers` and `activation_budget_bytes` count.
        model: Times and bytes.
        num_pipelines: Pipelines of the plan.
    """

    def __init__(self, pipeline: PipelinePlan, model: CostModel, num_pipelines: int) -> None:
        self._pipeline, self._model = without_chunks(pipeline), model
        self._num_pipelines, factor = num_pipelines, model.layout.activation_factor
        plans = self._pipeline.stages
        budgets = [stage.activation_budget_bytes for stage in plans]
        self.stages = tuple(
            _Stage(model.shape_of(stage), len(plans) - i, b if b is None else b * factor)
            for i, (stage, b) in enumerate(zip(plans, budgets, strict=True))
        )

    def cost(self, lengths: list[int]) -> PipelineCost:
        """Return the pipeline's cost, fitted to its times at some lengths.

        Raises:
            AssignmentError: A stage has no memory for tokens.
        """
        times_s = [self._times_s(length) for length in lengths]
        samples = [((n,), max(row)) for n, row in zip(lengths, times_s, strict=True)]
        fit = TimeFit.of(samples, needs_b=True)
        max_len = self.max_len()
        limit = min(max(1, self._kept_len()), max_len)
        found = PipelineCost(
            a=fit.a,
            b=fit.b,
            c=fit.c,
            max_len=max_len,
            util_len=util_len(fit, limit=limit),
            num_stages=len(self.stages),
        )
        longest, alone_s = lengths[-1], times_s[-1]
        if limit >= min(longest, max_len):
            return replace(found, max_len=limit)  # No sequence needs more.
        again_s = [self._recompute_s(stage, longest) for stage in self.stages]
        longer = max(map(sum, zip(alone_s, again_s, strict=True))) / max(alone_s) - 1.0
        share = longer / (1.0 - limit / longest)
        return replace(found, kept_len=limit, recompute_share=share)

    def max_len(self) -> int:
        """Return the most tokens of each micro-batch that all stages hold, a multiple of 128.

        Raises:
            AssignmentError: A stage holds less than 128.
        """
        if found := _most(self._holds):
            return found
        lacking = [self._lacking_bytes(stage, _MULTIPLE) > 0 for stage in self.stages]
        index, model = lacking.index(True), self._model
        shape = self.stages[index].shape
        states = model.memory_of_tokens(shape, self._num_pipelines, 0, 0).total
        raise AssignmentError(
            f"Stage {index} keeps {states / 2**30:.1f} GiB of states in "
            f"{model.usable_bytes(shape.device) / 2**30:.1f} GiB, which leaves room for less than "
            f"{_MULTIPLE} tokens. Use more stages or more tensor parallelism."
        )

    def ranks_without(self, tokens: int) -> list[int]:
        """Return the ranks of stages that don't hold micro-batches of that many tokens."""
        stages = zip(self._pipeline.stages, self.stages, strict=True)
        lacking = [plan for plan, stage in stages if self._lacking_bytes(stage, tokens) > 0]
        return [rank for stage in lacking for rank in stage.ranks]

    def with_budgets(self, longest: int) -> PipelinePlan:
        """Return the pipeline with the budgets that it needs for `longest` tokens.

        Only stages that would lack memory get a budget. If the pipeline can't hold `longest` tokens
        even then, budgets are for the most tokens that it can hold.
        """

        def can_hold(tokens: int) -> bool:
            return all(
                self._layers_bytes(stage, tokens)[1] <= self._left_for_layers(stage, tokens)
                for stage in self.stages
            )

        longest = -(-longest // _MULTIPLE) * _MULTIPLE  # As `max_len` counts.
        tokens = longest if can_hold(longest) else _most(can_hold)
        factor, stages = self._model.layout.activation_factor, []
        for plan, stage in zip(self._pipeline.stages, self.stages, strict=True):
            left = self._left_for_layers(stage, tokens)
            needs_one = tokens > 0 and self._layers_bytes(stage, tokens)[0] > left
            budget_bytes = int(left / factor) if needs_one else None
            stages.append(replace(plan, activation_budget_bytes=budget_bytes))
        return replace(self._pipeline, stages=tuple(stages))

    def _holds(self, tokens: int) -> bool:
        return all(self._lacking_bytes(stage, tokens) <= 0 for stage in self.stages)

    def _lacking_bytes(self, stage: _Stage, tokens: int) -> float:
        """Return the bytes that a stage lacks within its budget, 0 or less if it lacks none."""
        left = self._left_for_layers(stage, tokens)
        kept, least = self._layers_bytes(stage, tokens)
        if stage.budget_bytes is None:
            return kept - left
        return np.inf if least > stage.budget_bytes else min(kept, stage.budget_bytes) - left

    def _left_for_layers(self, stage: _Stage, tokens: int) -> float:
        """Return the bytes that everything else leaves for its layers' activations."""
        model, held = self._model, stage.num_in_flight * tokens
        needed = model.memory_of_tokens(stage.shape, self._num_pipelines, held, tokens).total
        usable = model.usable_bytes(stage.shape.device)
        return usable - needed + self._layers_bytes(stage, tokens)[0]

    def _layers_bytes(self, stage: _Stage, tokens: int) -> tuple[float, float]:
        """Return the bytes of its layers' activations: all layers kept, and all recomputed."""
        kept, of_input = self._model.layer_bytes(stage.shape)
        layers = stage.num_in_flight * stage.shape.num_layers * tokens
        return layers * kept, min(layers * kept, layers * of_input + tokens * (kept - of_input))

    def _kept_len(self) -> int:
        """Return the most tokens of which no stage recomputes anything to stay in its budget."""
        lengths = [
            int(stage.budget_bytes / self._layers_bytes(stage, _MULTIPLE)[0]) * _MULTIPLE
            for stage in self.stages
            if stage.budget_bytes is not None
        ]
        return min(lengths, default=NEVER_RECOMPUTED)

    def _recompute_s(self, stage: _Stage, tokens: int) -> float:
        """Return the seconds in which a stage recomputes to keep a micro-batch in its budget."""
        bytes_kept = self._layers_bytes(stage, tokens)[0]
        if stage.budget_bytes is None or bytes_kept <= stage.budget_bytes:
            return 0.0
        kept, of_input = self._model.layer_bytes(stage.shape)
        share = kept / (kept - of_input) * (1.0 - stage.budget_bytes / bytes_kept)
        everything = stage.shape._replace(recomputed_layers=stage.shape.num_layers)
        return min(1.0, share) * self._model.recompute_s(everything, (tokens,))

    def _times_s(self, tokens: int) -> list[float]:
        """Return the seconds of each stage for a sequence, if its budget recomputes nothing."""
        return [sum(self._model.compute_s(stage.shape, (tokens,))) for stage in self.stages]


def _most(fits: Callable[[int], bool]) -> int:
    """Return the most tokens that fit, a multiple of 128; 0 if 128 don't."""
    sizes = range(_MULTIPLE, _MOST_TOKENS, _MULTIPLE)
    return _MULTIPLE * bisect_left(sizes, True, key=lambda tokens: not fits(tokens))
