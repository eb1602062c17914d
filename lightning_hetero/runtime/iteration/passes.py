"""Run forward and backward passes on one stage: the user's step forward, autograd backward."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.core.actions import Action, ActionKind
from lightning_hetero.models.batches import sizes_of
from lightning_hetero.runtime.clock import ComputeClock, is_traced, traced
from lightning_hetero.runtime.iteration.running_plan import RunningPlan
from lightning_hetero.runtime.iteration.schedule_choice import StageSchedule
from lightning_hetero.runtime.iteration.step_results import StepResults
from lightning_hetero.runtime.stage.boundary import StageBoundary
from lightning_hetero.runtime.stage.microbatch_pass import (
    MicrobatchPass,
    StageEnd,
    seeds_of_pass,
)
from lightning_hetero.runtime.stage.recomputation import Recomputation
from lightning_hetero.runtime.stage.split_linear import LinearSplitter

__all__ = ["StagePasses"]


@dataclass
class _InFlight:
    """A micro-batch between its forward and its backward pass on a stage."""

    forward: MicrobatchPass
    received: list[Tensor]
    """Activation and side tensors from the stage before, as far as they have gradients."""
    outputs: list[Tensor]
    """Tensors sent on, or the loss on the last stage, as far as they have gradients."""
    gradient: Tensor | None
    """Gradient of the loss: its share of targets, or 1 for a sum. None if it is received."""


class StagePasses:
    """The passes of one iteration's micro-batches on one rank.

    Args:
        running: The plan that runs.
        boundary: The wrapped layers of the user's model.
        results: Collects the steps' results.
        microbatches: This rank's, in order.
        recomputations: What each of them computes again in backward.
        first_index: Index of the first of them among the micro-batches of all pipelines.
        seed: What the random numbers of all micro-batches depend on.
        splitter: Splits backward passes; None where none is split.
    """

    def __init__(  # noqa: PLR0913 - what an iteration consists of
        self,
        running: RunningPlan,
        boundary: StageBoundary,
        results: StepResults,
        microbatches: Sequence[Any],
        recomputations: Sequence[Recomputation],
        *,
        first_index: int,
        seed: tuple[int, ...],
        splitter: LinearSplitter | None = None,
    ) -> None:
        self.peak_in_flight = 0
        """Most micro-batches whose activations were held at once."""
        self._running = running
        self._layers, self._num_layers = running.layers, running.plan.num_layers
        self._boundary = boundary
        self._results = results
        self._microbatches = microbatches
        self._recomputations = recomputations
        # For all at once: code that runs once in each action costs ten times what it does here,
        # since the kernels in between have driven it out of the processor's caches.
        self._sizes = [sizes_of(item)[0] for item in microbatches]
        self._seeds = [(*seed, first_index + index) for index in range(len(microbatches))]
        self._drawn = [seeds_of_pass(self._num_layers, item) for item in self._seeds]
        self._splitter = splitter
        self._in_flight: dict[int, _InFlight] = {}
        self._has_run_backward = False

    def run(
        self,
        schedule: StageSchedule,
        step: Callable[[Any], Any],
        *,
        clock: ComputeClock,
        look: Callable[[], None],
    ) -> None:
        """Run the actions of the schedule; `look` is called after each.

        Raises:
            StepError, ModelError: The step or the model does something that a stage can't do.
        """
        self._running.link.begin(schedule.held, schedule.held_before)
        with nullcontext() if self._splitter is None else self._splitter.active():
            self._run_all(schedule.actions, step, clock=clock, look=look)

    def _run_all(
        self,
        actions: Sequence[Action],
        step: Callable[[Any], Any],
        *,
        clock: ComputeClock,
        look: Callable[[], None],
    ) -> None:
        are_traced = is_traced()
        self._expect_activations(0)
        for action in actions:
            with clock.action(action.kind, action.microbatch_index):
                if are_traced:
                    with traced(action):
                        self._run_action(action, step)
                else:
                    self._run_action(action, step)
                look()

    def _run_action(self, action: Action, step: Callable[[Any], Any]) -> None:
        index = action.microbatch_index
        if action.kind is ActionKind.FORWARD:
            self._forward(step, index)
        elif action.kind is ActionKind.WEIGHT:
            self._weights(index)
        elif self._splitter is None:
            self._backward(index, is_whole=True)
        else:
            with self._splitter.collecting(index):
                self._backward(index, is_whole=False)
            if action.kind is ActionKind.BACKWARD:
                self._weights(index)

    def _expect_activations(self, num_done: int) -> None:
        """Post receives of the micro-batches that come next, ahead of their forwards."""
        if self._running.link.previous is not None:
            self._running.link.expect_activations(len(self._microbatches) - num_done)

    def missing(self) -> tuple[str, ...]:
        """Return the parameters for which this rank's backward passes made no gradient."""
        if self._results.losses and not self._has_run_backward:
            # No loss had a target: gradients are zeros, as torch makes them for an empty mean.
            return ()
        return tuple(self._running.push.missing())

    def _forward(self, step: Callable[[Any], Any], index: int) -> None:
        microbatch, running, link = self._microbatches[index], self._running, self._running.link
        self._results.begin(microbatch, self._sizes[index])
        forward = MicrobatchPass(
            layers=self._layers,
            num_layers=self._num_layers,
            seed=self._seeds[index],
            drawn=self._drawn[index],
            receive=None if link.previous is None else link.receive_activation,
            wait_unit=running.pull.wait_unit if running.pull.is_under_way else None,
            recomputation=self._recomputations[index],
            reads=running.read_watch(),
        )
        try:
            output = self._run_step(forward, step, microbatch)
        except StageEnd as end:
            self._results.drop()
            link.send_activation(end.handed_on)
            self._expect_activations(index + 1)
            self._hold(index, forward, end.handed_on.tensors)
            return
        self._expect_activations(index + 1)
        losses, gradient = self._results.keep(output, microbatch)
        self._hold(index, forward, losses, gradient)

    def _run_step(
        self, forward: MicrobatchPass, step: Callable[[Any], Any], microbatch: Any
    ) -> Any:
        hiding = self._running.weights.in_step()
        if hiding is not None:
            with hiding, self._boundary.forward_of(forward):
                return step(microbatch)
        with self._boundary.forward_of(forward):
            return step(microbatch)

    def _hold(
        self,
        index: int,
        forward: MicrobatchPass,
        outputs: Sequence[Tensor],
        gradient: Tensor | None = None,
    ) -> None:
        if self._results.is_training:
            received = [] if forward.received is None else forward.received.tensors
            forward.last_hidden = None  # What autograd doesn't need isn't kept.
            self._in_flight[index] = _InFlight(
                forward,
                [tensor for tensor in received if tensor.requires_grad],
                [tensor for tensor in outputs if tensor.requires_grad],
                gradient,
            )
            if self._running.link.following is not None:
                self._running.link.expect_gradient(index, self._in_flight[index].outputs)
            self._running.num_in_flight = count = len(self._in_flight)
            if count > self.peak_in_flight:
                self.peak_in_flight = count

    def _weights(self, index: int) -> None:
        """Compute the gradients of weights that a micro-batch's backward has left."""
        assert self._splitter is not None
        is_last = index + 1 == len(self._microbatches)
        if is_last:
            self._running.push.begin_last_backward(self._splitter.names_waiting(index))
        self._splitter.run_weights(index)
        if is_last:
            self._running.push.end_last_backward()

    def _backward(self, index: int, *, is_whole: bool) -> None:
        held, link = self._in_flight.pop(index), self._running.link
        self._running.num_in_flight = len(self._in_flight)
        gradients = [] if held.gradient is None else [held.gradient]
        if link.following is not None:
            gradients = link.receive_gradient(index)
        # In reentrant checkpoints a weight gets its gradient in parts, and the last isn't known.
        is_last = is_whole and index + 1 == len(self._microbatches)
        is_last = is_last and not held.forward.is_reentrant
        if is_last:
            self._running.push.begin_last_backward()
        if held.outputs:
            self._has_run_backward = True
            self._boundary.run_backward(held.forward, held.outputs, gradients)
        if is_last:
            self._running.push.end_last_backward()
        if link.previous is not None:
            link.send_gradient(
                [torch.zeros_like(i) if i.grad is None else i.grad for i in held.received]
            )
