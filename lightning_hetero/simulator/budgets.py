"""Simulate the recomputation of stages with a budget of activations, as in a real iteration.

Both call `core.recomputation.fewest_recomputed`, with the same tokens and schedule.
"""

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from lightning_hetero.core.actions import schedule_1f1b
from lightning_hetero.core.plan import PipelinePlan
from lightning_hetero.core.recomputation import (
    LayerBytes,
    fewest_recomputed,
    held_at_backward,
    peak_activation_bytes,
)
from lightning_hetero.simulator.cost import CostModel
from lightning_hetero.simulator.memory import MemoryTerms, MicroBatchShape
from lightning_hetero.simulator.propagate import EqualTimes, Orders

__all__ = ["StageBudgets"]


class StageBudgets:
    """The budgets of one pipeline's stages in one iteration.

    Args:
        pipeline: The pipeline.
        cost: Times and bytes.
        microbatches: The pipeline's micro-batches.
        orders: The actions of its stages; None is 1F1B.

    Raises:
        PlanError: A budget doesn't even hold one recomputed layer.
    """

    def __init__(
        self,
        pipeline: PipelinePlan,
        cost: CostModel,
        microbatches: Sequence[MicroBatchShape],
        orders: Orders | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._cost = cost
        self._microbatches = microbatches
        self._orders = orders
        self._tokens = [sum(batch) for batch in microbatches]
        self.recompute_s: dict[int, tuple[float, ...]] = {}
        """For each stage with a budget, seconds of recomputation in each micro-batch's backward."""
        self.peak_bytes: dict[int, float] = {}
        """For each stage with a budget, the most bytes of its layers' activations."""
        for index, stage in enumerate(pipeline.stages):
            if stage.activation_budget_bytes is not None and microbatches:
                self._choose(pipeline, index, stage.activation_budget_bytes)

    def lengthen(self, runs: Sequence[EqualTimes]) -> Sequence[EqualTimes]:
        """Return the times with recomputation added to the backwards."""
        if not self.recompute_s:
            return runs
        singles = [run for run in runs for _ in range(run.num_microbatches)]
        found = []
        for m, run in enumerate(singles):
            more = [
                self.recompute_s[stage][m] if stage in self.recompute_s else 0.0
                for stage in range(len(run.backward_s))
            ]
            backward_s = tuple(map(operator.add, run.backward_s, more))
            found.append(replace(run, backward_s=backward_s, num_microbatches=1))
        return [replace(run, num_microbatches=len([*same])) for run, same in groupby(found)]

    def total_recompute_s(self) -> tuple[float, ...]:
        """Return the seconds in which each stage recomputes activations."""
        counts = Counter(self._microbatches)
        shapes = [self._cost.shape_of(stage) for stage in self._pipeline.stages]
        return tuple(
            sum(self.recompute_s[index])
            if index in self.recompute_s
            else sum(n * self._cost.recompute_s(shape, batch) for batch, n in counts.items())
            for index, shape in enumerate(shapes)
        )

    def bound(self, index: int, terms: MemoryTerms, held: int) -> MemoryTerms:
        """Return the terms of a stage that keeps all layers, with activations cut to its budget.

        Args:
            index: The stage.
            terms: Its terms if it kept all layers.
            held: Most tokens of micro-batches in flight.
        """
        if index not in self.peak_bytes:
            return terms
        shape = self._cost.shape_of(self._pipeline.stages[index])
        layers = shape.num_layers * self._cost.layer_bytes(shape)[0] * held
        return terms._replace(activations=terms.activations - layers + self.peak_bytes[index])

    def _choose(self, pipeline: PipelinePlan, index: int, budget_bytes: int) -> None:
        stage, cost = pipeline.stages[index], self._cost
        shape, num_layers = cost.shape_of(stage), len(stage.layers)
        kept, recomputed = cost.layer_bytes(shape)
        layer = LayerBytes(kept=kept, recomputed=recomputed)
        if self._orders is None:
            order = schedule_1f1b(
                stage_index=index,
                num_stages=pipeline.num_stages,
                num_microbatches=len(self._microbatches),
            )
        else:
            order = tuple(self._orders[index])
        windows = held_at_backward(order)
        # A run compares its budget with what it counts of a layer, without the correction.
        room = budget_bytes * cost.layout.activation_factor
        counts = fewest_recomputed(room, layer, num_layers, self._tokens, windows)
        self.peak_bytes[index] = peak_activation_bytes(
            layer, num_layers, self._tokens, counts, windows
        )
        self.recompute_s[index] = tuple(
            cost.recompute_s(shape._replace(recomputed_layers=count), batch)
            for count, batch in zip(counts, self._microbatches, strict=True)
        )
