"""Collect the results of a rank's steps in an iteration: losses, logs, outputs, appended items.

Only a last stage's step runs to its end. Its results are taken here and nowhere else: how a loss
counts (`targets`), what a step appends to the module's lists (`appended_lists`), and what it
returns besides its loss (`outputs`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.core.errors import StepError
from lightning_hetero.models.batches import epoch_weight
from lightning_hetero.runtime.results.appended_lists import AppendedLists, warn_of_numbers
from lightning_hetero.runtime.results.draws import DrawWatch, warn_of_draws
from lightning_hetero.runtime.results.iteration_loss import LossSums, has_nonfinite
from lightning_hetero.runtime.results.log_entries import LogEntry
from lightning_hetero.runtime.results.loss_trial import LossTrial
from lightning_hetero.runtime.results.numbers.kinds import Kind, as_weight
from lightning_hetero.runtime.results.outputs import StepRecord
from lightning_hetero.runtime.results.padded_means import THE_LOSS, PaddedMeans
from lightning_hetero.runtime.results.step_logs import StepLogs
from lightning_hetero.runtime.results.targets import LossReduction, LossWatch, weigh_loss
from lightning_hetero.runtime.unknown import check_known

__all__ = ["StepResults"]


class StepResults:
    """Collects the results of the steps of one iteration's micro-batches on one rank.

    Called for each micro-batch: `begin`, then `drop` if the stage ended the step, else `keep`.

    Args:
        module: The user's.
        logs: What steps log.
        device: Where losses are summed.
        loss_reduction: What the user says that losses are; None detects it.
        is_training: Whether steps return losses.
        ends_early: Whether the rank's stage ends steps before they have results.
        make_trial: Makes the trial of the first step's loss, given its micro-batch and number of
            samples; None tries none.
        looks_at_means: Whether to look for means that count pads.
        loss_scale: Factor of the losses' gradients, so that fp16 doesn't lose the small ones.
    """

    def __init__(  # noqa: PLR0913 - what an iteration's steps may make
        self,
        module: nn.Module,
        logs: StepLogs,
        device: torch.device,
        *,
        loss_reduction: LossReduction | None,
        is_training: bool,
        ends_early: bool = False,
        make_trial: Callable[[Any, int], LossTrial] | None = None,
        looks_at_means: bool = False,
        loss_scale: float = 1.0,
    ) -> None:
        self._loss_scale = loss_scale
        self.is_training = is_training
        self.records: list[StepRecord] = []
        """What the steps of a last stage returned and appended, one record per micro-batch."""
        self.losses = LossSums(device)
        self.means = PaddedMeans(waits=make_trial is not None) if looks_at_means else None
        """Looks for means that count pads, in some iterations."""
        self.lists = AppendedLists(module, looks_at_parts=make_trial is not None)
        self.module = module
        """The user's."""
        self.is_tried = make_trial is not None
        """Whether losses and their backward passes are tried in this iteration."""
        self.draws = DrawWatch(module) if self.is_tried else None
        """Watches what steps draw where they are tried."""
        self.epoch_weight = 0
        """Of all micro-batches that have begun."""
        self._ends_early = ends_early
        self._idle_watch = LossWatch()
        """For steps that end before there is anything to watch."""
        self._sizes = (0, 0)
        self._logs = logs
        self._device = device
        self._loss_reduction = loss_reduction
        self._by_module = getattr(module, "num_target_tokens", None)
        """The module's own count of a batch's targets."""
        self._make_trial = make_trial

    def begin(self, microbatch: Any, sizes: tuple[int, int]) -> LossWatch:
        """Note the module's state before a step; return the watch to use in the step.

        Args:
            microbatch: The argument of the step.
            sizes: Its samples and tokens.
        """
        self.lists.begin()
        self._sizes, num_samples = sizes, sizes[0]
        self.epoch_weight += epoch_weight(microbatch, num_samples)
        make, self._make_trial = self._make_trial, None
        trial = None if make is None else make(microbatch, num_samples)
        if self._ends_early:
            return self._idle_watch
        if self.means is not None:
            self.means.begin(microbatch, num_samples)
        return LossWatch(self._logs.buffers(), num_samples, trial)

    def drop(self) -> None:
        """Discard the results of a step that ended with its stage."""
        self._logs.drop_microbatch()
        self.lists.take(after_layers=False)

    def keep(self, output: Any, microbatch: Any, watch: LossWatch) -> tuple[list[Tensor], Tensor]:
        """Take what a step that ran to its end has returned, logged and appended.

        Returns:
            The loss and its gradient. There is no loss outside of training, nor for no targets:
            that loss may be NaN, and 0 * NaN is NaN.

        Raises:
            StepError, ModelError: It returned no loss, or what this stage doesn't know.
        """
        is_named = isinstance(output, Mapping)
        if self.is_training and is_named:
            output = dict(output)  # Lightning takes any mapping, and hands on a dict.
        check_known(output, "What the step returns needs")
        returned = output.get("loss") if is_named else output
        loss = _checked_loss(returned, output).float() if self.is_training else None
        judged = weigh_loss(self._by_module, microbatch, watch, returned, self._loss_reduction)
        weight = as_weight(judged.targets, self._device)
        if self.means is not None and self._loss_reduction is None:
            self._look_at_means(self.means, returned, watch)
        self._logs.keep_microbatch(weight, watch.reductions, self.means)
        rest = output if loss is None else _without_loss(output)
        appended = self.lists.take(after_layers=True)
        self.records.append(StepRecord.of(rest, appended, self._sizes, watch.reductions))
        watch.reductions.forget()
        watch.groups.forget()
        if loss is None:
            return [], weight
        self.losses.add(loss, judged, weight)
        if judged.kind is Kind.SUM:
            return [loss], torch.full_like(loss, self._loss_scale)
        # Counts on an accelerator aren't read: that would wait for the forward pass. If they are 0,
        # the gradient is 0; a loss that divides by them is then found by its NaN gradients.
        is_known = not isinstance(judged.targets, Tensor) or judged.targets.device.type == "cpu"
        # As a number, since comparing tensors makes one more.
        return [] if is_known and not float(judged.targets) > 0 else [loss], (
            weight.float() * self._loss_scale
        )

    def _look_at_means(self, means: PaddedMeans, loss: object, watch: LossWatch) -> None:
        means.see_averaged(watch.reductions.averaged)
        if self.is_training and self._by_module is None:
            means.see(THE_LOSS, watch.reductions.of(loss))

    def finish(
        self,
        gradients: Callable[[], Iterable[Tensor]],
        *,
        is_cut: bool,
        is_shared_out: bool,
    ) -> None:
        """Check gradients, and warn of lists and draws, after the iteration's last action.

        Args:
            gradients: Returns the gradients that backward passes have made.
            is_cut: Whether the iteration has several micro-batches or ranks.
            is_shared_out: Whether it has several micro-batches or pipelines.
        """
        if self.is_training:
            self.losses.has_nonfinite = has_nonfinite(gradients(), self._device)
        if is_cut:
            warn_of_numbers(self.lists.counted)
        if self.draws is not None and is_shared_out:
            # With one micro-batch, each pipeline draws the items that one device draws.
            items = self.draws.from_iterators if self.draws.num_steps > 1 else set()
            warn_of_draws(items | self.draws.from_generators)

    def row(self, entries: Sequence[LogEntry]) -> Tensor:
        """Return this rank's sums: the totals of losses, then of values logged under entries."""
        return torch.cat([self.losses.totals(), self._logs.as_row(entries)])


def _without_loss(output: Any) -> dict[str, Any]:
    if not isinstance(output, dict):
        return {}
    return {key: value for key, value in output.items() if key != "loss"}


def _checked_loss(loss: Any, output: Any) -> Tensor:
    """Return the loss among what a training step has returned, without dims."""
    if output is None:
        raise StepError(
            "training_step returned None. Under a pipeline every micro-batch needs a loss: return "
            "the loss, or one that is 0 times the model's output to skip a micro-batch."
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise StepError(
            f"training_step returned {type(output).__name__}; it must return the loss, a tensor "
            "with one element, or a mapping that holds it under 'loss'."
        )
    if not loss.requires_grad:
        raise StepError(
            "training_step returned a loss without gradients. Don't detach it, and let at least "
            "one parameter that it depends on require gradients."
        )
    return loss.reshape(()) if loss.ndim else loss
