"""Decide which layers of a rank's stage each micro-batch of an iteration computes again.

What the plan says goes first, then the strategy's option. Under a budget of bytes
`core.recomputation` decides, from the micro-batches' tokens and from what a layer keeps. That is
counted in the first iteration, in which all layers are recomputed but one: the last layer of the
first micro-batch, whose backward comes before any other layer is computed again, so that this takes
no more memory than a budget must hold at least. Later iterations count one kept layer each, and the
most that was counted for a token goes for all.
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
    """A rank's count of one layer, for the ranks that will run such layers."""

    tp_degree: int
    layer: LayerBytes


class RecomputationChoice:
    """Chooses what stages of one rank recompute, and learns what layers keep.

    Args:
        options: What the strategy says where the plan doesn't.
    """

    def __init__(self, options: LayerOptions) -> None:
        self.measured: MeasuredBytes | None = None
        """This rank's counts of this iteration, for its report."""
        self._options = options
        self._known: dict[int, LayerBytes] = {}
        self._last: tuple[StagePlan, Recomputation] | None = None
        """The stage that ran last, where nothing is decided anew for each iteration."""

    def of(
        self, stage: StagePlan | None, microbatches: Sequence[Any], schedule: tuple[Action, ...]
    ) -> list[Recomputation]:
        """Return what each micro-batch of an iteration recomputes.

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

    def learn(self, measured: Sequence[MeasuredBytes]) -> None:
        """Take what all ranks have counted; called by every rank with the same."""
        self.measured = None
        for item in measured:
            known = self._known.get(item.tp_degree, item.layer)
            # The larger of two ranks' serves both, which must recompute the same.
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
                window.recomputed(layer)  # It must be possible.

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
