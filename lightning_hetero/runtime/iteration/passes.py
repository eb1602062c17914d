"""Run the forward and backward passes of one iteration on one rank.

A forward runs the user's step on a micro-batch, a backward runs autograd. If backward passes are
split (see `stage.split_layers`), the gradients of weights are computed later, in actions of their
own.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.core.actions import Action, ActionKind
from lightning_hetero.models.batches import epoch_weight
from lightning_hetero.runtime.clock import ComputeClock, traced
from lightning_hetero.runtime.iteration.running_plan import RunningPlan
from lightning_hetero.runtime.iteration.schedule_choice import StageSchedule
from lightning_hetero.runtime.iteration.split_parts import copy_of
from lightning_hetero.runtime.iteration.step_results import StepResults
from lightning_hetero.runtime.random_state import seeds_of
from lightning_hetero.runtime.stage.boundary import StageBoundary
from lightning_hetero.runtime.stage.chunks import Chunk
from lightning_hetero.runtime.stage.microbatch_pass import MicrobatchPass, StageEnd
from lightning_hetero.runtime.stage.recomputation import Recomputation
from lightning_hetero.runtime.stage.split_layers import LayerSplitter

_Key = tuple[int, int]
"""(index of the stage, index of the micro-batch)."""


@dataclass
class _InFlight:
    """A micro-batch between its forward and its backward pass on a stage."""

    forward: MicrobatchPass
    received: list[Tensor]
    """Tensors received from the previous stage that need gradients: the activation and side
    tensors."""
    outputs: list[Tensor]
    """The tensors with gradients that were sent to the next stage, or on the last stage the
    loss."""
    gradient: Tensor | None
    """The gradient with which the loss's backward begins, see `LossScale`; None if the gradients
    come from the next stage."""


class StagePasses:
    """The passes of one iteration's micro-batches on one rank.

    `num_samples` and, by stage, `recomputations` are those of each micro-batch. Random numbers are
    seeded by `seed` and the micro-batch's index among those of all pipelines, of which this rank's
    first one has `first_index`. Without `splitter` backward passes aren't split.
    """

    def __init__(  # noqa: PLR0913 - what an iteration consists of
        self,
        running: RunningPlan,
        boundary: StageBoundary,
        results: StepResults,
        microbatches: Sequence[Any],
        num_samples: Sequence[int],
        recomputations: Mapping[int, Sequence[Recomputation]],
        *,
        first_index: int,
        seed: tuple[int, ...],
        splitter: LayerSplitter | None = None,
    ) -> None:
        self.peak_in_flight = 0
        """Largest number of micro-batches between forward and backward at once, summed over
        chunks."""
        self._running = running
        self._chunks = {chunk.index: chunk for chunk in running.chunks}
        self._num_layers = running.plan.num_layers
        self._has_both_ends = running.has_both_ends
        self._boundary = boundary
        self._results = results
        self._microbatches = microbatches
        self._recomputations = recomputations
        self._num_samples = num_samples
        # For all micro-batches at once: inside an action the same code takes ten times as long,
        # because the kernels before it have displaced it from the processor's caches.
        self._seeds = [(*seed, first_index + index) for index in range(len(microbatches))]
        self._drawn = [seeds_of(self._num_layers + 2, *item) for item in self._seeds]
        self._splitter = splitter
        self._in_flight: dict[_Key, _InFlight] = {}
        self._has_run_backward = False
        self._unfinished = dict(self._chunks)
        """Chunks whose last backward is still to come."""
        self._sums: dict[int, dict[str, Tensor]] = {}
        """By stage, the gradients of outer parameters; only on ranks that run both ends."""

    def run(
        self,
        schedule: StageSchedule,
        step: Callable[[Any], Any],
        *,
        clock: ComputeClock,
        after_action: Callable[[], None],
    ) -> None:
        """Run the actions of the schedule, and call `after_action` after each."""
        for index, chunk in self._chunks.items():
            chunk.link.begin(schedule.held_by(index), schedule.held_by(index - 1))
            self._expect_activations(chunk, 0)
        with nullcontext() if self._splitter is None else self._splitter.active():
            for action in schedule.actions:
                with clock.action(action.kind, action.microbatch_index, action.stage_index):
                    with traced(action):
                        self._run_action(action, step)
                    after_action()
        self._join_sums()

    def _run_action(self, action: Action, step: Callable[[Any], Any]) -> None:
        key = action.stage_index, action.microbatch_index
        if action.kind is ActionKind.FORWARD:
            self._forward(step, *key)
            return
        apart = self._keeping_apart(action.stage_index) if self._has_both_ends else nullcontext()
        with apart:
            if action.kind is ActionKind.WEIGHT:
                self._weights(key)
            elif self._splitter is None:
                self._backward(key, is_whole=True)
            else:
                with self._splitter.collecting(key):
                    self._backward(key, is_whole=False)
                if action.kind is ActionKind.BACKWARD:
                    self._weights(key)

    @contextmanager
    def _keeping_apart(self, stage_index: int) -> Iterator[None]:
        """On a rank that runs both ends of a pipeline, sum outer parameters' gradients by stage.

        So their total doesn't depend on the order in which the two ends run.
        """
        shards, sums = self._running.weights.shards, self._sums.setdefault(stage_index, {})
        for name in self._running.outer:
            shards[name].grad = sums.get(name)
        yield
        for name in self._running.outer:
            gradient = shards[name].grad
            if gradient is not None:
                sums[name] = gradient

    def _join_sums(self) -> None:
        for name in self._running.outer if self._sums else ():
            parts = [self._sums[stage].get(name) for stage in sorted(self._sums)]
            found = [part for part in parts if part is not None]
            for part in found[1:]:
                found[0].add_(part)
            self._running.weights.shards[name].grad = found[0] if found else None

    def _expect_activations(self, chunk: Chunk, num_done: int) -> None:
        """Post receives of the next micro-batches' activations before their forwards run."""
        if chunk.link.previous is not None:
            chunk.link.expect_activations(len(self._microbatches) - num_done)

    def missing(self) -> tuple[str, ...]:
        """Return the trainable parameters that this rank's backward passes gave no gradient."""
        if self._results.losses and not self._has_run_backward:
            # No micro-batch had a target: gradients are zeros, as torch's are for a mean over
            # nothing.
            return ()
        return tuple(self._running.push.missing())

    def _forward(self, step: Callable[[Any], Any], stage_index: int, index: int) -> None:
        microbatch, running = self._microbatches[index], self._running
        chunk = self._chunks[stage_index]
        link = chunk.link
        if chunk is running.chunks[0]:
            self._results.epoch_weight += epoch_weight(microbatch, self._num_samples[index])
        if chunk is not running.chunks[-1]:
            microbatch = copy_of(microbatch)  # It is needed again, and a step may change it.
        forward = MicrobatchPass(
            layers=chunk.stage.layers,
            num_layers=self._num_layers,
            seed=self._seeds[index],
            drawn=self._drawn[index],
            receive=None if link.previous is None else link.receive_activation,
            wait_unit=running.pull.wait_unit if running.pull.is_under_way else None,
            recomputation=self._recomputations[stage_index][index],
            reads=running.read_watch(chunk),
        )
        try:
            with running.weights.in_step():
                output = self._boundary.run_step(forward, step, microbatch)
        except StageEnd as end:
            self._results.drop()
            link.send_activation(end.handed_on)
            self._expect_activations(chunk, index + 1)
            self._hold((stage_index, index), forward, end.handed_on.tensors)
            return
        self._expect_activations(chunk, index + 1)
        losses, gradient = self._results.keep(output, microbatch)
        self._hold((stage_index, index), forward, losses, gradient)

    def _hold(
        self,
        key: _Key,
        forward: MicrobatchPass,
        outputs: Sequence[Tensor],
        gradient: Tensor | None = None,
    ) -> None:
        if self._results.is_training:
            stage_index, index = key
            received = [] if forward.received is None else forward.received.tensors
            forward.last_hidden = None  # Keep only what autograd needs.
            self._in_flight[key] = _InFlight(
                forward,
                [tensor for tensor in received if tensor.requires_grad],
                [tensor for tensor in outputs if tensor.requires_grad],
                gradient,
            )
            link = self._chunks[stage_index].link
            if link.following is not None:
                link.expect_gradient(index, self._in_flight[key].outputs)
            self._running.num_in_flight = count = len(self._in_flight)
            if count > self.peak_in_flight:
                self.peak_in_flight = count

    def _weights(self, key: _Key) -> None:
        """Compute the gradients of weights that a micro-batch's split backward has left out."""
        assert self._splitter is not None
        is_last = key[1] + 1 == len(self._microbatches)
        if is_last:
            self._begin_last_backward(key[0], self._splitter.names_waiting(key))
        self._splitter.run_weights(key)
        if is_last:
            self._running.push.end_last_backward()

    def _begin_last_backward(self, stage_index: int, coming: Collection[str] | None) -> None:
        """Begin a stage's last backward, in which units leave as soon as they are final."""
        running = self._running
        chunk = self._unfinished.pop(stage_index)
        later = frozenset[str]().union(*map(running.parameters_of, self._unfinished.values()))
        if len(running.chunks) > 1:
            own = running.parameters_of(chunk)
            coming = own if coming is None else own & {*coming}
            if self._has_both_ends:
                later |= running.outer
        running.push.begin_last_backward(coming, later)

    def _backward(self, key: _Key, *, is_whole: bool) -> None:
        held, link = self._in_flight.pop(key), self._chunks[key[0]].link
        self._running.num_in_flight = len(self._in_flight)
        gradients: Sequence[Tensor] = [] if held.gradient is None else [held.gradient]
        if link.following is not None:
            gradients = link.receive_gradient(key[1])
        # Reentrant checkpoints add to a gradient in parts, and don't say which is the last.
        is_whole &= not held.forward.is_reentrant
        is_last = is_whole and key[1] + 1 == len(self._microbatches)
        if is_last:
            self._begin_last_backward(key[0], None)
        if held.outputs:
            self._has_run_backward = True
            self._boundary.run_backward(held.forward, held.outputs, gradients)
        if is_last:
            self._running.push.end_last_backward()
        if link.previous is not None:  # At the action's end, as traces of operations say.
            link.send_gradient(
                [torch.zeros_like(i) if i.grad is None else i.grad for i in held.received]
            )
