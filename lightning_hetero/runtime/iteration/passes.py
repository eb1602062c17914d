"""Run one iteration's actions on one stage: the user's step forward, autograd backward."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.core.actions import Action, ActionKind
from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.clock import ComputeClock
from lightning_hetero.runtime.iteration.buffers import BufferWatch
from lightning_hetero.runtime.iteration.finiteness import has_nonfinite
from lightning_hetero.runtime.iteration.running_plan import RunningPlan
from lightning_hetero.runtime.results.appended_lists import AppendedLists, warn_of_numbers
from lightning_hetero.runtime.results.iteration_loss import no_totals
from lightning_hetero.runtime.results.outputs import StepRecord
from lightning_hetero.runtime.results.reductions import Kind, as_weight, ends_of, ratio_of
from lightning_hetero.runtime.results.step_logs import StepLogs
from lightning_hetero.runtime.results.targets import (
    LossReduction,
    LossWatch,
    LossWeight,
    weigh_loss,
)
from lightning_hetero.runtime.stage.boundary import StageBoundary
from lightning_hetero.runtime.stage.microbatch_pass import MicrobatchPass, StageEnd
from lightning_hetero.runtime.stage.read_watch import ReadWatch
from lightning_hetero.runtime.stage.side_tensors import Handover
from lightning_hetero.runtime.trace import traced
from lightning_hetero.runtime.unknown import check_known

__all__ = ["IterationKey", "Propagation", "StepContext"]


@dataclass(frozen=True, kw_only=True)
class IterationKey:
    """What an iteration's random numbers depend on."""

    stage: int
    """0 training, 1 validation, 2 test, 3 prediction."""
    epoch: int
    batch_idx: int

    def __str__(self) -> str:
        return f"batch {self.batch_idx} in epoch {self.epoch}"


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """What the steps of all iterations have in common on one rank."""

    module: nn.Module
    boundary: StageBoundary
    logs: StepLogs
    num_layers: int
    """Layers of the model."""
    device: torch.device
    seed: int
    """Base of the random seeds."""
    clock: ComputeClock
    """Times the actions."""
    buffers: BufferWatch
    """Looks at what actions do to buffers."""
    loss_reduction: LossReduction | None = None
    """What the user says that losses are; None finds out."""


@dataclass
class _InFlight:
    """What a stage keeps of a micro-batch between its forward and its backward."""

    run: MicrobatchPass
    received: list[Tensor]
    """Hidden state and side tensors from the stage before, as far as they have gradients."""
    outputs: list[Tensor]
    """Those sent on, or the loss on the last stage, as far as they have gradients.

    None where a loss is over no targets: it may be no number, and 0 * NaN is NaN.
    """
    gradient: Tensor | None
    """The loss's: its target tokens. Others come from the stage behind."""


class Propagation:
    """The micro-batches of one iteration on one rank.

    Args:
        run: The plan that runs.
        context: What stays the same from iteration to iteration.
        microbatches: This rank's, in order.
        first_index: Index of the first of them among the micro-batches of all pipelines.
        key: What random numbers depend on.
        training: Whether there is a backward.
    """

    def __init__(
        self,
        run: RunningPlan,
        context: StepContext,
        microbatches: Sequence[Any],
        *,
        first_index: int,
        key: IterationKey,
        training: bool,
    ) -> None:
        self.microbatches = microbatches
        self.records: list[StepRecord] = []
        """What the steps of a last stage left behind, one a micro-batch."""
        self.training = training
        self.peak_in_flight = 0
        """Most micro-batches whose activations were held at once."""
        self.reads: set[str] = set()
        """Parameters outside the layers that were used, if that is watched."""
        self._run = run
        self._context = context
        self._first_index = first_index
        self._key = key
        self._in_flight: dict[int, _InFlight] = {}
        self._losses: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._ratios: list[Tensor] = []
        self._lists = AppendedLists(context.module)
        self._num_backwards = 0
        self.loss_kinds: set[Kind] = set()
        """What the losses were of; in training on last stages."""

    def run(self, step: Callable[[Any], Any]) -> None:
        """Run the stage's schedule."""
        actions = self._run.schedule(len(self.microbatches), training=self.training)
        for action, upcoming in zip_longest(actions, actions[1:]):
            self._expect(action, upcoming)
            timed = self._context.clock.action(action.kind, action.microbatch_index)
            with traced(str(action)), timed:
                if action.kind is ActionKind.FORWARD:
                    self._forward(step, action.microbatch_index)
                else:
                    self._backward(action.microbatch_index)
                self._context.buffers.look()
        if self.training:
            self._nonfinite = has_nonfinite(self._run.push.gradients(), self._context.device)
        if len(self.microbatches) > 1 or len(self._run.plan.ranks) > 1:
            warn_of_numbers(self._lists.counted)

    def _forward(self, step: Callable[[Any], Any], index: int) -> None:
        microbatch = self.microbatches[index]
        watch = LossWatch()
        run = self._microbatch_pass(index, watch)
        self._lists.begin()
        try:
            with self._run.weights.in_step(), self._context.boundary.forward_of(run):
                output = step(microbatch)
        except StageEnd as end:
            self._context.logs.drop_microbatch()
            self._lists.take(behind_layers=False)
            self._context.clock.before_send()
            self._run.link.send_activation(
                end.handed_on.tensors, (end.handed_on.left, end.handed_on.forms)
            )
            self._hold(index, run, end.handed_on.tensors)
            return
        self._context.boundary.check_finished(run)
        check_known(output, "What the step returns needs")
        loss = _loss_of(output).float() if self.training else None
        judged = weigh_loss(
            self._context.module,
            microbatch,
            watch,
            output.get("loss") if isinstance(output, Mapping) else output,
            self._context.loss_reduction,
        )
        weight = as_weight(judged.targets, self._context.device)
        self._context.logs.keep_microbatch(weight, watch.reductions)
        rest = output if loss is None else _without_loss(output)
        appended = self._lists.take(behind_layers=True)
        self.records.append(StepRecord.of(rest, appended, microbatch, watch.reductions))
        watch.reductions.restore({})  # It holds what a step has made.
        if loss is None:
            return
        self._keep_loss(loss, judged, weight)
        is_sum = judged.kind is Kind.SUM
        seed = torch.ones_like(loss) if is_sum else weight.float()
        # Of a count that an accelerator makes, this waits for the forward.
        counts = is_sum or bool(judged.targets > 0)
        self._hold(index, run, [loss] if counts else [], seed)

    def _keep_loss(self, loss: Tensor, judged: LossWeight, weight: Tensor) -> None:
        loss = loss.detach().double()
        if judged.kind is not Kind.SUM:
            # The mean of no targets is no number, and must count nothing.
            loss = torch.where(weight > 0, loss * weight, 0.0)
        self.loss_kinds.add(judged.kind)
        self._losses.append(loss)
        self._weights.append(weight)
        self._ratios += ratio_of(judged.others, weight)

    def totals(self) -> Tensor:
        """Return what this rank says of its losses and gradients, as `IterationLoss` takes it."""
        device = self._context.device
        totals = no_totals(device)
        if self._losses:
            totals[0], totals[1] = torch.stack(self._losses).sum(), torch.stack(self._weights).sum()
            totals[2], totals[3] = ends_of(self._ratios, device)
        if self.training:
            totals[4] = self._nonfinite
        return totals

    def missing(self) -> tuple[str, ...]:
        """Return the parameters for which this rank's backwards made no gradient."""
        if self._losses and self._num_backwards == 0:
            # No loss had a target: gradients are zeros, as torch makes them of a mean of nothing.
            return ()
        return tuple(self._run.push.missing())

    def _hold(
        self,
        index: int,
        run: MicrobatchPass,
        outputs: Sequence[Tensor],
        gradient: Tensor | None = None,
    ) -> None:
        if self.training:
            received = () if run.received is None else run.received.tensors
            run.last_hidden = None  # What autograd doesn't need isn't kept.
            held = _InFlight(run, _learned(received), _learned(outputs), gradient)
            self._in_flight[index] = held
            self.peak_in_flight = max(self.peak_in_flight, len(self._in_flight))

    def _microbatch_pass(self, index: int, watch: LossWatch) -> MicrobatchPass:
        key, link = self._key, self._run.link

        def receive() -> Handover:
            tensors, note = link.receive_activation()
            return Handover(tensors, *note)

        return MicrobatchPass(
            layers=self._run.layers,
            num_layers=self._context.num_layers,
            seed=(
                self._context.seed,
                key.stage,
                key.epoch,
                key.batch_idx,
                self._first_index + index,
            ),
            receive=receive if link.previous is not None else None,
            wait_unit=self._run.pull.wait_unit,
            loss_watch=watch,
            lists=self._lists,
            reads=self._read_watch(),
        )

    def _read_watch(self) -> ReadWatch | None:
        link = self._run.link
        if not self._run.is_watched or link.previous is link.following is None:
            return None
        is_first = link.previous is None
        return ReadWatch(self._run.weights.outer, self.reads, is_first=is_first)

    def _expect(self, action: Action, upcoming: Action | None) -> None:
        """Begin to receive the gradient that the next action needs, while this one computes.

        Only when this action is a forward: behind a backward, the order on the communicator must
        stay receive, send, receive, send.
        """
        if (
            upcoming is not None
            and upcoming.kind is ActionKind.BACKWARD
            and action.kind is ActionKind.FORWARD
            and self._run.link.following is not None
            and upcoming.microbatch_index in self._in_flight
        ):
            outputs = self._in_flight[upcoming.microbatch_index].outputs
            self._run.link.expect_gradient(upcoming.microbatch_index, outputs)

    def _backward(self, index: int) -> None:
        held, link = self._in_flight.pop(index), self._run.link
        gradients: list[Tensor | None] = [held.gradient]
        if link.following is not None:
            link.expect_gradient(index, held.outputs)
            gradients = [*link.receive_gradient(index)]
        # Within older checkpoints a weight gets its gradient in parts, and none says it's the last.
        is_last = index + 1 == len(self.microbatches) and not held.run.is_reentrant
        with (
            self._run.gradient_counter.counting(is_last=is_last),
            self._context.boundary.backward_of(held.run),
        ):
            if held.outputs:
                self._num_backwards += 1
                torch.autograd.backward(held.outputs, gradients)
        if link.previous is not None:
            self._context.clock.before_send()
            link.send_gradient(
                [torch.zeros_like(i) if i.grad is None else i.grad for i in held.received]
            )


def _learned(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad]


def _without_loss(output: Any) -> dict[str, Any]:
    if not isinstance(output, Mapping):
        return {}
    return {key: value for key, value in output.items() if key != "loss"}


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, dict) else output
    if loss is None:
        raise StepError(
            "training_step returned None. Under a pipeline every micro-batch needs a loss: return "
            "the loss, or one that is 0 times the model's output to skip a micro-batch."
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise StepError(
            f"training_step returned {type(output).__name__}; it must return the loss, a tensor "
            "with one element, or a dict that holds it under 'loss'."
        )
    if not loss.requires_grad:
        raise StepError(
            "training_step returned a loss without gradients. Don't detach it, and let at least "
            "one parameter that it depends on require gradients."
        )
    return loss.reshape(())
