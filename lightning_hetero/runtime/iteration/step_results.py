"""Collect the results of a rank's steps in an iteration: losses, gradients, logs, outputs, lists.

Only on a pipeline's last stage does the user's step run to its end, so only that stage has results.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.iteration.config import EngineConfig
from lightning_hetero.runtime.results.counts import Counting, LossRule, as_weight
from lightning_hetero.runtime.results.iteration_loss import (
    NUM_TOTALS,
    LateNumbers,
    NonfiniteGradients,
    answer_nonfinite,
    has_nonfinite,
    loss_and_scale,
    totals_of,
)
from lightning_hetero.runtime.results.outputs import AppendedLists, StepRecord
from lightning_hetero.runtime.results.step_logs import LogEntry, StepLogs
from lightning_hetero.runtime.slices.weights import SliceStore
from lightning_hetero.runtime.unknown import check_known

_NAN = (
    "An iteration's loss is NaN, though its gradients are finite, as if it were a mean over "
    "nothing. It is taken for {rule}, which has something to count there: if the mean is over "
    "something else, count that by num_target_tokens(batch) in the module."
)


@dataclass(frozen=True)
class LossScale:
    """How the losses of an iteration's micro-batches count."""

    rule: LossRule | None = None
    """Whether losses are sums or means, and over what; None until a check has found out."""
    is_sum: bool = False
    """Whether losses are added without weights: each is a sum, or it is the iteration's only
    one."""
    unit: float = 1.0
    """Power of two near the iteration's number of targets. The backward of a micro-batch's mean
    loss begins with the gradient targets / unit, which is close to 1."""


class StepResults:
    """Collects the results of one rank's steps in one iteration.

    For each micro-batch `keep` is called if the step ran to its end, or `drop` if it was left at
    the end of its stage.

    `factor` is the loss scale of fp16, by which gradients are multiplied so that small ones don't
    vanish.
    """

    def __init__(
        self,
        module: nn.Module,
        logs: StepLogs,
        device: torch.device,
        *,
        scale: LossScale,
        is_training: bool,
        factor: float = 1.0,
    ) -> None:
        self._factor = factor
        self.is_training = is_training
        self.records: list[StepRecord] = []
        """What steps returned and appended on a last stage; one record for each micro-batch."""
        self.losses: list[Tensor] = []
        """The losses of its micro-batches."""
        self._weights: list[Tensor] = []
        self._has_nonfinite = torch.zeros((), dtype=torch.float64, device=device)
        self.epoch_weight = 0
        """Weight in an epoch's mean, summed over the micro-batches that have begun."""
        self._lists = AppendedLists(module)
        self._logs = logs
        self._device = device
        self._scale = scale
        self._by_module = getattr(module, "num_target_tokens", None)
        """The module's method that counts the targets of a batch, if it has one."""

    def drop(self) -> None:
        """Discard the results of a step that was left at the end of its stage."""
        self._logs.drop_microbatch()
        self._lists.take()

    def keep(self, output: Any, microbatch: Any) -> tuple[list[Tensor], Tensor]:
        """Keep what a step that has run to its end returned, logged and appended.

        Returns the loss, and the gradient with which its backward begins. Outside of training there
        is no loss. A micro-batch without targets has none either: its loss may be NaN, and 0 * NaN
        is NaN.

        Raises:
            StepError: The step returned no loss.
            ModelError: It returned values that this stage doesn't know.
        """
        is_named = isinstance(output, Mapping)
        if self.is_training and is_named:
            output = dict(output)  # Lightning takes any mapping but hands on a dict.
        check_known(output, "What the step returns needs")
        returned = output.get("loss") if is_named else output
        loss = loss_of(output).float() if self.is_training else None
        count = self._count(microbatch)
        if not isinstance(count, Tensor) or count.device.type == "cpu":
            count = float(count)
        weight = as_weight(count, self._device)
        is_sum = self._scale.is_sum and self._scale.rule is not None
        self._logs.keep_microbatch(weight, summed=returned if is_sum else None)
        rest = output
        if loss is not None:
            items = output.items() if is_named else ()
            rest = {key: value for key, value in items if key != "loss"}
        self.records.append(StepRecord(rest, self._lists.take(), weight).detached())
        if loss is None:
            return [], weight
        self.losses.append(loss.detach())
        self._weights.append(weight)
        if self._scale.is_sum:
            return [loss], torch.full_like(loss, self._factor)
        gradient = torch.full_like(loss, self._factor / self._scale.unit).mul_(weight)
        # A count on an accelerator isn't read: the host would wait for the forward pass. If it is
        # 0, so is the gradient; a loss that divides by it is found out by gradients of NaN.
        has_none = isinstance(count, float) and not count > 0
        return [] if has_none else [loss], gradient

    def _count(self, microbatch: Any) -> Any:
        """Return the number of targets of a micro-batch, by which means are weighted."""
        rule = self._scale.rule
        counting = Counting.usual(microbatch, self._by_module) if rule is None else rule.counting
        return counting.of(microbatch, self._by_module)

    def finish(self, gradients: Callable[[], Iterable[Tensor]]) -> None:
        """After the last action, note whether gradients are finite (see `has_nonfinite`)."""
        if self.is_training:
            self._has_nonfinite = has_nonfinite(gradients(), self._device)

    def row(self, entries: Sequence[LogEntry]) -> Tensor:
        """Return this rank's sums for the agreement: of losses, then of logged values."""
        is_sum, broken = self._scale.is_sum, self._has_nonfinite
        totals = totals_of(self.losses, self._weights, broken, is_sum=is_sum)
        return torch.cat([totals, self._logs.as_row(entries)])


class StepGradients:
    """The gradients of this rank's slices that training iterations leave for the optimizer."""

    def __init__(self, store: SliceStore, device: torch.device, config: EngineConfig) -> None:
        self.by_name: dict[str, Tensor] = {}
        self.are_finite = True
        """Whether the last iteration's gradients were finite; the same on every rank."""
        self.loss_scale = 1.0
        """Factor by which losses are multiplied in backward passes; the same on every rank."""
        self.unused: set[str] = set()
        """Parameters without a gradient on any rank in the last iteration."""
        self._store = store
        self._config = config
        self._late = LateNumbers(device)

    def finish(
        self,
        sums: Mapping[str, Tensor] | None,
        unused: set[str],
        reported: Tensor,
        losses: LossScale,
        batch: str,
    ) -> Tensor | None:
        """Keep and scale an iteration's summed gradients, if there are any; return the loss.

        `unused` parameters have no gradients. `reported` are the sums of all ranks, `batch` names
        the batch in error messages.
        """
        if sums is None:
            return None
        totals = reported[:, :NUM_TOTALS]
        loss, scale = loss_and_scale(totals, is_sum=losses.is_sum, unit=losses.unit)
        owned = self._store.owned_device
        self.unused = unused
        self.by_name = {name: item for name, item in sums.items() if name not in unused}
        if self.by_name:
            torch._foreach_mul_([*self.by_name.values()], scale.to(owned) / self.loss_scale)
        masters, self.are_finite = self._store.masters, True
        self.by_name = {name: i.to(masters[name].dtype) for name, i in self.by_name.items()}
        # Before the optimizer's step the host must know whether to skip it.
        skips = self._config.nonfinite_gradients is NonfiniteGradients.SKIP
        is_now = skips or self._config.scales_loss
        is_late = self._late.is_late and not is_now
        if is_late:
            is_broken = totals[:, NUM_TOTALS - 1].any().to(owned)
            for gradient in self.by_name.values():
                gradient.masked_fill_(is_broken, 0)

        def answer(numbers: Tensor) -> None:
            broken = numbers[:, NUM_TOTALS - 1].nonzero()[:, 0].tolist()
            if broken:
                self.by_name, self.are_finite = {}, False
                found = f"{batch} aren't finite; ranks {broken} made them."
                if not self._config.scales_loss:
                    answer_nonfinite(found, self._config.nonfinite_gradients, is_late=is_late)
            elif bool(numbers[:, 0].isnan().any()):
                rank_zero_warn(_NAN.format(rule=losses.rule))

        self._late.judge(totals, answer, now=is_now)
        return loss

    def settle(self) -> None:
        """Check the last iteration's sums, which arrive late on accelerators; see `LateNumbers`."""
        self._late.settle()


def loss_of(output: Any) -> Tensor:
    """Return the loss from the output of a training step, as a tensor without dims.

    Raises:
        StepError: There is none, or it has no gradient.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
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
