"""Find how many tokens a pipeline's micro-batches may have, and what longer ones recompute.

All bytes are the cost model's, for micro-batches of one length T, W of them in flight on a stage of
n layers. With K and R the bytes per token of a kept and of a recomputed layer and a budget B of
activations, the stage keeps all of them up to T' = B / (W·n·K) tokens, and holds at most the T with
`W·T·n·R + T·(K - R) = B`: all inputs, and one layer that is being recomputed. Between both it
recomputes `n·K / (K - R)·(1 - T' / T)` layers, rounded up.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_hetero.core.errors import AssignmentError
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
from lightning_hetero.simulator import CostModel, StageShape

__all__ = ["SequenceRoom", "with_budgets"]

_MULTIPLE = 128
_MOST_TOKENS = 2**40


@dataclass(frozen=True, kw_only=True)
class _StageRoom:
    """The memory of one stage with micro-batches of one length in flight."""

    cost: CostModel
    shape: StageShape
    num_pipelines: int
    num_in_flight: int
    budget_bytes: float | None
    """Budget of the stage's activations, times their correction factor as all bytes here."""

    @property
    def usable_bytes(self) -> float:
        return self.cost.usable_bytes(self.shape.device)

    def needed_bytes(self, tokens: int) -> float:
        """Return the rank's peak if the stage recomputes what its shape says."""
        held = tokens * self.num_in_flight
        return self.cost.memory_of_tokens(self.shape, self.num_pipelines, held, tokens).total

    def layers_bytes(self, tokens: int) -> tuple[float, float]:
        """Return the bytes of its layers' activations: all layers kept, and all recomputed."""
        kept, of_input = self.cost.layer_bytes(self.shape)
        layers = self.num_in_flight * self.shape.num_layers * tokens
        return layers * kept, min(layers * kept, layers * of_input + tokens * (kept - of_input))

    def keeps(self, tokens: int) -> bool:
        """Return whether micro-batches of that many tokens need no recomputation by its budget."""
        return self.budget_bytes is None or self.layers_bytes(tokens)[0] <= self.budget_bytes

    def holds(self, tokens: int) -> bool:
        """Return whether micro-batches of that many tokens fit, recomputed to stay in budget."""
        needed = self.needed_bytes(tokens)
        if self.budget_bytes is not None:
            kept, least = self.layers_bytes(tokens)
            if least > self.budget_bytes:
                return False
            needed -= max(0.0, kept - self.budget_bytes)
        return needed <= self.usable_bytes

    def left_for_layers(self, tokens: int) -> float:
        """Return the bytes that everything else leaves for its layers' activations."""
        return self.usable_bytes - self.needed_bytes(tokens) + self.layers_bytes(tokens)[0]

    def recompute_s(self, tokens: int) -> float:
        """Return the seconds in which it recomputes activations of a micro-batch."""
        if self.budget_bytes is None or self.keeps(tokens):
            return 0.0
        kept, of_input = self.cost.layer_bytes(self.shape)
        share = kept / (kept - of_input) * (1.0 - self.budget_bytes / self.layers_bytes(tokens)[0])
        everything = self.shape._replace(recomputed_layers=self.shape.num_layers)
        return min(1.0, share) * self.cost.recompute_s(everything, (tokens,))


class SequenceRoom:
    """How many tokens the micro-batches of a pipeline may have.

    Args:
        pipeline: Its stages' `recomputed_layers` and `activation_budget_bytes` count.
        cost: Times and bytes.
        num_pipelines: Pipelines of the plan.
    """

    def __init__(self, pipeline: PipelinePlan, cost: CostModel, num_pipelines: int) -> None:
        self.pipeline = pipeline
        factor = cost.layout.activation_factor
        self._stages = [
            _StageRoom(
                cost=cost,
                shape=cost.shape_of(stage),
                num_pipelines=num_pipelines,
                num_in_flight=pipeline.num_stages - index,
                budget_bytes=None
                if stage.activation_budget_bytes is None
                else stage.activation_budget_bytes * factor,
            )
            for index, stage in enumerate(pipeline.stages)
        ]

    def max_len(self) -> int:
        """Return the most tokens of each micro-batch that all stages hold, a multiple of 128.

        Raises:
            AssignmentError: A stage holds less than 128.
        """
        found = _most(lambda tokens: all(stage.holds(tokens) for stage in self._stages))
        if found:
            return found
        index = next(i for i, stage in enumerate(self._stages) if not stage.holds(_MULTIPLE))
        stage = self._stages[index]
        raise AssignmentError(
            f"Stage {index} keeps {stage.needed_bytes(0) / 2**30:.1f} GiB of states in "
            f"{stage.usable_bytes / 2**30:.1f} GiB, which leaves room for less than "
            f"{_MULTIPLE} tokens. Use more stages or more tensor parallelism."
        )

    def ranks_without(self, tokens: int) -> list[int]:
        """Return the ranks of stages that don't hold micro-batches of that many tokens."""
        stages = zip(self.pipeline.stages, self._stages, strict=True)
        return [rank for plan, stage in stages if not stage.holds(tokens) for rank in plan.ranks]

    def kept_len(self) -> int:
        """Return the most tokens, up to `max_len`, that no stage recomputes by its budget."""
        return max(1, _most(lambda n: all(s.keeps(n) and s.holds(n) for s in self._stages)))

    def recompute_s(self, tokens: int) -> list[float]:
        """Return the seconds in which each stage recomputes activations of a micro-batch."""
        return [stage.recompute_s(tokens) for stage in self._stages]

    def with_budgets(self, longest: int) -> PipelinePlan:
        """Return the pipeline with the budgets that it needs for `longest` tokens.

        It is unchanged if it holds them already, or if recomputation gains nothing. If it can't
        hold them, it gets budgets for the most that it can. Only stages that need one get one.
        """

        def can_hold(tokens: int) -> bool:
            return all(
                stage.holds(tokens)
                or stage.layers_bytes(tokens)[1] <= stage.left_for_layers(tokens)
                for stage in self._stages
            )

        longest = -(-longest // _MULTIPLE) * _MULTIPLE  # As `max_len` counts.
        if all(stage.holds(longest) for stage in self._stages):
            return self.pipeline
        tokens = longest if can_hold(longest) else _most(can_hold)
        if not tokens or all(stage.holds(tokens) for stage in self._stages):
            return self.pipeline
        stages = zip(self.pipeline.stages, self._stages, strict=True)
        return replace(
            self.pipeline, stages=tuple(_with_budget(plan, room, tokens) for plan, room in stages)
        )


def with_budgets(plan: ParallelPlan, cost: CostModel, longest: int) -> ParallelPlan:
    """Return a plan whose pipelines recompute where that lets them take longer sequences.

    Args:
        plan: A plan whose stages name no recomputation.
        cost: Times and bytes.
        longest: Tokens of the longest sequence.
    """
    rooms = [SequenceRoom(pipeline, cost, plan.num_pipelines) for pipeline in plan.pipelines]
    return replace(plan, pipelines=tuple(room.with_budgets(longest) for room in rooms))


def _with_budget(stage: StagePlan, room: _StageRoom, tokens: int) -> StagePlan:
    if room.holds(tokens):
        return stage
    budget_bytes = room.left_for_layers(tokens) / room.cost.layout.activation_factor
    return replace(stage, activation_budget_bytes=int(budget_bytes))


def _most(fits: Callable[[int], bool]) -> int:
    """Return the most tokens that fit, a multiple of 128; 0 if 128 don't."""
    sizes = range(_MULTIPLE, _MOST_TOKENS, _MULTIPLE)
    return _MULTIPLE * bisect_left(sizes, True, key=lambda tokens: not fits(tokens))
