"""The work of one pipeline in an iteration: its stages, and its actions' seconds and bytes.

Stages with a budget of activations recompute in each micro-batch as many layers as a real iteration
does: both call `core.recomputation.fewest_recomputed`, with the same tokens and schedule.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby, pairwise

from lightning_hetero.core.places import stages_by_worker
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.recomputation import (
    LayerBytes,
    fewest_recomputed,
    held_at_backward,
    peak_activation_bytes,
)
from lightning_hetero.schedules import usual_actions
from lightning_hetero.simulator.cost import CostModel
from lightning_hetero.simulator.memory import (
    MemoryTerms,
    MicroBatchShape,
    StageFacts,
    held_tokens,
    in_flight_tokens,
)
from lightning_hetero.simulator.propagate import EqualTimes, Orders
from lightning_hetero.simulator.stage import StageShape

_Key = tuple[MicroBatchShape, tuple[int, ...]]
"""A micro-batch, and the layers that each stage with a budget recomputes in it."""


class PipelineWork:
    """The work of one pipeline of a plan.

    Args:
        plan: The plan.
        index: The pipeline.
        cost: Times and bytes.
        microbatches: Its micro-batches.
        orders: The actions of its workers; None is 1F1B.

    Raises:
        PlanError: A budget doesn't even hold one recomputed layer.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        index: int,
        cost: CostModel,
        microbatches: Sequence[MicroBatchShape],
        orders: Orders | None,
    ) -> None:
        pipeline = plan.pipelines[index]
        self.workers = pipeline.workers
        chunks = stages_by_worker(self.workers)
        self._chunks = [chunks[worker] for worker in self.workers]
        """For each stage all stages of its ranks."""
        self.has_chunks = pipeline.has_chunks
        if self.has_chunks and orders is None:
            orders = usual_actions(self.workers, len(microbatches))
        self.microbatches, self.orders, self._cost = microbatches, orders, cost
        self._plan, self._stages = plan, pipeline.stages
        self.shapes = [cost.shape_in(plan, stage) for stage in self._stages]
        pairs = zip(self._stages, self.shapes, strict=True)
        self._owned = [cost.owned_params(plan, *pair) for pair in pairs]
        if plan.owner_shares is not None:  # They give all that a rank owns, over all its stages.
            first = [own[0] == stage for stage, own in enumerate(self._chunks)]
            self._owned = [o * is_first for o, is_first in zip(self._owned, first, strict=True)]
        self._recomputed: dict[int, Sequence[int]] = {}
        """For each stage with a budget, the layers that it recomputes in each micro-batch."""
        self._peak_bytes: dict[int, float] = {}
        """For each stage with a budget, the peak bytes of its layers' activations."""
        for number, stage in enumerate(self._stages):
            if stage.activation_budget_bytes is not None and microbatches:
                self._keep_within(number, stage.activation_budget_bytes)
        again = zip(*self._recomputed.values(), strict=True)
        counts = list(again) if self._recomputed else [()] * len(microbatches)
        self._keys = list(zip(microbatches, counts, strict=True))

    @cached_property
    def times(self) -> list[EqualTimes]:
        """Seconds of every action and message, by runs of equal micro-batches."""
        known: dict[_Key, EqualTimes] = {}
        hops, cost = list(pairwise(self._stages)), self._cost
        for key in dict.fromkeys(self._keys):
            batch, shapes = key[0], self._shapes_in(key)
            pairs, tokens = [cost.compute_s(shape, batch) for shape in shapes], sum(batch)
            known[key] = EqualTimes(
                tuple([forward for forward, _ in pairs]),
                tuple([backward for _, backward in pairs]),
                tuple([cost.activation_s(a, b, tokens) for a, b in hops]),
                tuple([cost.activation_s(b, a, tokens) for a, b in hops]),
                1,
                tuple([cost.weight_s(s, batch) for s in shapes]) if self.orders else (),
            )
        return [
            replace(known[key], num_microbatches=len([*same])) for key, same in groupby(self._keys)
        ]

    @property
    def first_forward_s(self) -> Sequence[float]:
        """Seconds of the first forward on each stage; zeros without micro-batches."""
        return self.times[0].forward_s if self.times else [0.0] * len(self.shapes)

    @property
    def steps_s(self) -> list[float]:
        """Seconds of the optimizer step of each stage's ranks."""
        each = [self._cost.update_s(*p) for p in zip(self.shapes, self._owned, strict=True)]
        return [sum(each[stage] for stage in own) for own in self._chunks]

    @cached_property
    def recompute_s(self) -> tuple[float, ...]:
        """Seconds in which each stage recomputes activations."""
        counts = [(key[0], self._shapes_in(key), n) for key, n in Counter(self._keys).items()]
        return tuple(
            sum(n * self._cost.recompute_s(shapes[index], batch) for batch, shapes, n in counts)
            for index in range(len(self.shapes))
        )

    def facts(self, busy: Sequence[float]) -> tuple[StageFacts, ...]:
        """Return the facts of each stage, given the share of the iteration in which it computes."""
        cost, names = self._cost, [shape.device for shape in self.shapes]
        columns = zip(names, self.memory, busy, self.recompute_s, strict=True)
        return tuple(
            [
                StageFacts(name, memory, cost.device(name).memory_bytes, share, again_s)
                for name, memory, share, again_s in columns
            ]
        )

    @cached_property
    def memory(self) -> tuple[MemoryTerms, ...]:
        """The peak of each stage's ranks."""
        return self.memory_holding([self._held_tokens(index) for index in range(len(self.shapes))])

    def memory_holding(self, held: Sequence[int]) -> tuple[MemoryTerms, ...]:
        """Return the peak of each stage's ranks if each stage holds `held` tokens at once."""
        longest = max(map(sum, set(self.microbatches)), default=0)
        found = []
        for index, (shape, owned) in enumerate(zip(self.shapes, self._owned, strict=True)):
            terms = self._cost.memory_of_tokens(
                shape, self._plan.num_pipelines, held[index], longest, owned_params=owned
            )
            if index in self._peak_bytes:
                kept = shape.num_layers * self._cost.layer_bytes(shape)[0] * held[index]
                beside = terms.activations - kept
                terms = terms._replace(activations=beside + self._peak_bytes[index])
            found.append(terms)
        if not self.has_chunks:
            return tuple(found)
        return tuple(
            [MemoryTerms.of_chunks([found[stage] for stage in own]) for own in self._chunks]
        )

    def _held_tokens(self, index: int) -> int:
        """Return the tokens in flight on a stage when its ranks hold the most."""
        if self.orders is not None:
            layers = {stage: len(self._stages[stage].layers) for stage in self._chunks[index]}
            order = self.orders[self.workers[index]]
            return held_tokens(order, self.microbatches, layers)[index]
        depth = min(len(self.shapes) - index, len(self.microbatches))
        return in_flight_tokens(self.microbatches, depth) if depth else 0

    def _shapes_in(self, key: _Key) -> list[StageShape]:
        """Return the stages' shapes with what they recompute in a micro-batch."""
        shapes = list(self.shapes)
        for index, count in zip(self._recomputed, key[1], strict=True):
            shapes[index] = shapes[index]._replace(recomputed_layers=count)
        return shapes

    def _keep_within(self, index: int, budget_bytes: int) -> None:
        """Choose what a stage recomputes in each micro-batch."""
        cost, num_layers = self._cost, len(self._stages[index].layers)
        kept, recomputed = cost.layer_bytes(self.shapes[index])
        layer = LayerBytes(kept=kept, recomputed=recomputed)
        tokens = [sum(batch) for batch in self.microbatches]
        orders = self.orders or usual_actions(self.workers, len(tokens))
        own = tuple(a for a in orders[self.workers[index]] if a.stage_index == index)
        windows = held_at_backward(own)
        # A run compares its budget with what it counts of a layer, without the correction.
        room = budget_bytes * cost.layout.activation_factor
        counts = fewest_recomputed(room, layer, num_layers, tokens, windows)
        self._recomputed[index] = counts
        self._peak_bytes[index] = peak_activation_bytes(layer, num_layers, tokens, counts, windows)
