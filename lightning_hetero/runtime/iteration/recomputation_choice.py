"""Decide which layers of a rank's stage each micro-batch of an iteration recomputes.

The plan decides; if it says nothing, the strategy's option. Under a budget of bytes
`core.recomputation` decides, from the micro-batches' tokens and the bytes that a layer keeps. These
are counted in the first iteration, in which all layers are recomputed but one: the last layer of
the first micro-batch. Its backward comes before any layer is recomputed, so this takes no more
memory than the least possible budget. Later iterations count one kept layer each, and the maximum
per token is used for all.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_hetero.core.actions import Action
from lightning_hetero.core.errors import PlanError
from lightning_hetero.core.plan import StagePlan
from lightning_hetero.core.recomputation import LayerBytes, fewest_recomputed, held_at_backward
from lightning_hetero.models.batches import count_samples, sample_lengths
from lightning_hetero.runtime.stage.recomputation import (
    LayerOptions,
    MeasuredLayer,
    Recomputation,
    is_said,
)

__all__ = ["MeasuredBytes", "RecomputationChoice"]


@dataclass(frozen=True)
class MeasuredBytes:
    """A rank's count of one layer's bytes, used by all stages with its TP degree."""

    tp_degree: int
    layer: LayerBytes


class RecomputationChoice:
    """Chooses which layers stages of one rank recompute, and learns how many bytes layers keep.

    Args:
        options: The strategy's options, used if the plan says nothing.
    """

    def __init__(self, options: LayerOptions) -> None:
        self.measured: MeasuredBytes | None = None
        """This rank's counts of this iteration, for its report."""
        self._options = options
        self._known: dict[int, LayerBytes] = {}
        self._last: tuple[StagePlan, Recomputation] | None = None
        """The stage that ran last and its choice, if that is the same in every iteration."""

    def of(
        self, stage: StagePlan | None, microbatches: Sequence[Any], schedule: tuple[Action, ...]
    ) -> list[Recomputation]:
        """Return which layers each micro-batch of an iteration recomputes.

        Args:
            stage: The rank's; None if it is idle.
            microbatches: The rank's.
            schedule: The stage's training schedule.

        Raises:
            PlanError: The budget doesn't even hold one recomputed layer.
        """
        if stage is None:
            return [Recomputation() for _ in microbatches]
        if self._last is not None and self._last[0] is stage:
            return [self._last[1]] * len(microbatches)
        budget = stage.activation_budget_bytes
        if not is_said(stage):
            budget = self._options.activation_budget_bytes
        if budget is None:
            self._last = stage, self._fixed(stage)
            return [self._last[1]] * len(microbatches)
        tokens = [_count_tokens(microbatch) for microbatch in microbatches]
        window = _Budget(stage, budget, tokens, schedule)
        layer, num_layers = self._known.get(stage.tp_degree), len(stage.layers)
        counts = [num_layers - (index == 0) for index in range(len(tokens))]
        if layer is not None:
            counts = list(window.recomputed(layer))
        chosen = [_first(stage, count) for count in counts]
        index = next((i for i, count in enumerate(counts) if count < num_layers), None)
        if index is not None and tokens[index]:
            chosen[index] = replace(chosen[index], measured=self._last_layer(window, index))
        return chosen

    def alone(self, stage: StagePlan | None, num_parts: int) -> list[Recomputation]:
        """Return what a check's parts recompute: under a budget all layers."""
        if stage is None:
            return [Recomputation()] * num_parts
        budget = stage.activation_budget_bytes
        if not is_said(stage):
            budget = self._options.activation_budget_bytes
        chosen = self._fixed(stage) if budget is None else Recomputation(layers=stage.layers)
        return [chosen] * num_parts

    def learn(self, measured: Sequence[MeasuredBytes]) -> None:
        """Take over all ranks' counts; called by every rank with the same, after the agreement."""
        self.measured = None
        for item in measured:
            known = self._known.get(item.tp_degree, item.layer)
            # The larger count is used, since ranks of a stage must recompute the same.
            self._known[item.tp_degree] = LayerBytes(
                kept=max(known.kept, item.layer.kept),
                recomputed=max(known.recomputed, item.layer.recomputed),
            )

    def _fixed(self, stage: StagePlan) -> Recomputation:
        options, layers = self._options, stage.layers
        whole: Container[int] = options.recomputed(layers)
        selective: Container[int] = options.selective(layers)
        if is_said(stage):
            count = stage.recomputed_layers or 0
            whole = layers[:count]
            selective = layers[count : count + (stage.selective_layers or 0)]
        return Recomputation(layers=whole, selective=selective)

    def _last_layer(self, window: "_Budget", index: int) -> MeasuredLayer:
        """Return the last layer of a stage, to be counted while a micro-batch runs it."""
        stage = window.stage

        def report(layer: LayerBytes) -> None:
            known = self._known.get(stage.tp_degree)
            if known is None or layer.kept > known.kept or layer.recomputed > known.recomputed:
                self.measured = MeasuredBytes(stage.tp_degree, layer)
            if known is None:
                window.recomputed(layer)  # Raises if the budget is too small.

        return MeasuredLayer(index=stage.layers[-1], num_tokens=window.tokens[index], report=report)


@dataclass(frozen=True)
class _Budget:
    """A stage's budget in one iteration."""

    stage: StagePlan
    num_bytes: int
    tokens: Sequence[int]
    schedule: tuple[Action, ...]

    def recomputed(self, layer: LayerBytes) -> tuple[int, ...]:
        """Return how many layers each micro-batch recomputes."""
        try:
            return fewest_recomputed(
                self.num_bytes,
                layer,
                len(self.stage.layers),
                self.tokens,
                held_at_backward(self.schedule),
            )
        except PlanError as error:
            raise PlanError(f"The stage on ranks {list(self.stage.ranks)}: {error}") from None


def _first(stage: StagePlan, count: int) -> Recomputation:
    return Recomputation(layers=stage.layers[:count])


def _count_tokens(microbatch: Any) -> int:
    """Return the tokens of a micro-batch, padding included; its samples if it has none."""
    own = getattr(microbatch, "num_tokens", None)
    if isinstance(own, int):
        return own
    return sum(sample_lengths(microbatch)) or count_samples(microbatch)
