"""Decide which layers of a rank's stage each micro-batch of an iteration recomputes.

The plan decides or, if it says nothing, the strategy's option. Under a budget in bytes
`core.recomputation` decides, from the tokens of each micro-batch and the bytes that a layer keeps
per token. To count these, the first iteration recomputes all layers but the last one of the first
micro-batch: its backward comes before any layer is recomputed, so this takes no more memory than
the smallest possible budget. Each later iteration counts one layer; the largest count is used.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any

from lightning_hetero.core.actions import Action
from lightning_hetero.core.errors import PlanError
from lightning_hetero.core.plan import StagePlan
from lightning_hetero.core.recomputation import (
    LayerBytes,
    fewest_recomputed,
    held_at_backward,
)
from lightning_hetero.models.batches import count_samples, sample_lengths
from lightning_hetero.runtime.stage.chunks import Chunk
from lightning_hetero.runtime.stage.recomputation import (
    LayerOptions,
    MeasuredLayer,
    Recomputation,
    names_recomputation,
)

MeasuredBytes = tuple[int, LayerBytes]
"""A rank's TP degree, and its count of one layer's bytes, used by all stages with this degree."""


class RecomputationChoice:
    """Chooses which layers stages of one rank recompute, and learns how many bytes layers keep."""

    def __init__(self, options: LayerOptions) -> None:
        self.measured: MeasuredBytes | None = None
        """What this rank has counted in this iteration, for its report."""
        self._options = options
        self._known: dict[int, LayerBytes] = {}
        self._last: tuple[Sequence[Chunk], dict[int, list[Recomputation]]] | None = None
        """The chunks that ran last, and their choice if it is the same in every iteration."""

    def of(
        self, chunks: Sequence[Chunk], microbatches: Sequence[Any], schedule: tuple[Action, ...]
    ) -> dict[int, list[Recomputation]]:
        """Return, for each stage, which layers each micro-batch of an iteration recomputes.

        Raises:
            PlanError: The budget doesn't even hold one recomputed layer.
        """
        count = len(microbatches)
        if self._last is not None and self._last[0] is chunks:
            return {index: chosen * count for index, chosen in self._last[1].items()}
        budgets = [self._budget(chunk.stage, chunks) for chunk in chunks]
        if all(budget is None for budget in budgets):
            self._last = chunks, {item.index: [self._fixed(item.stage)] for item in chunks}
            return self.of(chunks, microbatches, schedule)
        found = {}
        for chunk, budget in zip(chunks, budgets, strict=True):
            found[chunk.index] = [self._fixed(chunk.stage)] * count
            if budget is not None:
                own = tuple(item for item in schedule if item.stage_index == chunk.index)
                found[chunk.index] = self._within(budget, chunk.stage, microbatches, own)
        return found

    def _budget(self, stage: StagePlan, chunks: Sequence[Chunk]) -> int | None:
        """Return a stage's budget: the plan's, or its part of the rank's budget in the options."""
        whole = self._options.activation_budget_bytes
        if names_recomputation(stage) or whole is None:
            return stage.activation_budget_bytes
        return whole * len(stage.layers) // sum(len(chunk.stage.layers) for chunk in chunks)

    def _within(
        self,
        budget: int,
        stage: StagePlan,
        microbatches: Sequence[Any],
        schedule: tuple[Action, ...],
    ) -> list[Recomputation]:
        """Return which layers each micro-batch recomputes on a stage with a budget."""
        tokens, windows = [*map(_count_tokens, microbatches)], held_at_backward(schedule)
        layer, num_layers = self._known.get(stage.tp_degree), len(stage.layers)

        def fewest(layer: LayerBytes) -> tuple[int, ...]:
            try:
                return fewest_recomputed(budget, layer, num_layers, tokens, windows)
            except PlanError as error:
                raise PlanError(f"The stage on ranks {list(stage.ranks)}: {error}") from None

        counts = [num_layers - (index == 0) for index in range(len(tokens))]
        if layer is not None:
            counts = list(fewest(layer))
        chosen = [Recomputation(layers=stage.layers[:count]) for count in counts]
        index = next((i for i, count in enumerate(counts) if count < num_layers), None)
        if index is not None and tokens[index]:
            measured = self._last_layer(stage, tokens[index], fewest)
            chosen[index] = replace(chosen[index], measured=measured)
        return chosen

    def alone(self, chunk: Chunk) -> Recomputation:
        """Return what the batches of the loss check recompute on a stage: under a budget, all."""
        stage = chunk.stage
        if self._budget(stage, [chunk]) is None:
            return self._fixed(stage)
        return Recomputation(layers=stage.layers)

    def learn(self, measured: Sequence[MeasuredBytes]) -> None:
        """Take over the counts of all ranks, after an agreement."""
        self.measured = None
        for tp_degree, layer in measured:
            known = self._known.get(tp_degree, layer)
            # The larger count is used, since ranks of a stage must recompute the same.
            self._known[tp_degree] = LayerBytes(
                kept=max(known.kept, layer.kept),
                recomputed=max(known.recomputed, layer.recomputed),
            )

    def _fixed(self, stage: StagePlan) -> Recomputation:
        options, layers = self._options, stage.layers
        whole: Container[int] = options.recomputed(layers)
        selective: Container[int] = options.selective(layers)
        if names_recomputation(stage):
            count = stage.recomputed_layers or 0
            whole = layers[:count]
            selective = layers[count : count + (stage.selective_layers or 0)]
        return Recomputation(layers=whole, selective=selective)

    def _last_layer(
        self, stage: StagePlan, num_tokens: int, fewest: Callable[[LayerBytes], object]
    ) -> MeasuredLayer:
        """Return the last layer of a stage, whose bytes are to be counted while it runs."""

        def report(layer: LayerBytes) -> None:
            known = self._known.get(stage.tp_degree)
            if known is None or layer.kept > known.kept or layer.recomputed > known.recomputed:
                self.measured = stage.tp_degree, layer
            if known is None:
                fewest(layer)  # Raises if the budget is too small.

        return MeasuredLayer(index=stage.layers[-1], num_tokens=num_tokens, report=report)


def _count_tokens(microbatch: Any) -> int:
    """Return the tokens of a micro-batch, padding included; its samples if it has none."""
    own = getattr(microbatch, "num_tokens", None)
    if isinstance(own, int):
        return own
    return sum(sample_lengths(microbatch)) or count_samples(microbatch)
