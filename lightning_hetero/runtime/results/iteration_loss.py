"""Compute the loss of an iteration from the sums of all ranks, and whether gradients are finite.

Each rank checks its own gradients before they are sent, and reports the result with its sums. So if
any gradient is NaN or infinite, all ranks know it, and none makes an optimizer step with it.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from lightning_hetero.core.errors import StepError
from lightning_hetero.core.reading import Choice

NUM_TOTALS = 5
"""Number of a rank's totals: the sum of losses (means times their targets), the sum of targets, the
sum and the number of losses without targets, and whether gradients aren't finite."""

_SMALL_NUMEL = 2**14
"""Tensors of up to this many elements are concatenated before they are summed: for 49 gradients of
a small model this takes 25 µs instead of 110."""


def loss_and_scale(totals: Tensor, *, is_sum: bool, unit: float) -> tuple[Tensor, Tensor]:
    """Return an iteration's loss, and the factor by which summed gradients are multiplied.

    If no rank has a target, the loss is the mean of the losses that steps returned.

    Args:
        totals: The totals of each rank: shape (num_ranks, NUM_TOTALS or more).
        is_sum: Whether losses are sums.
        unit: See `LossScale.unit`.
    """
    loss, weight, empty, num_empty = totals[:, : NUM_TOTALS - 1].sum(0).unbind()
    if is_sum:
        return loss.float(), torch.ones_like(loss)
    value = torch.where(weight > 0, loss / weight, empty / num_empty)
    return value.float(), (unit / weight).nan_to_num_(0.0, 0.0, 0.0)


def totals_of(
    losses: Sequence[Tensor], weights: Sequence[Tensor], broken: Tensor, *, is_sum: bool
) -> Tensor:
    """Return a rank's totals, (NUM_TOTALS,).

    `weights` are the targets of each loss's micro-batch, `broken` is what `has_nonfinite` returned.
    """
    nothing = torch.zeros_like(broken)
    if not losses:
        return torch.stack([nothing] * (NUM_TOTALS - 1) + [broken])
    values, counts = torch.stack([*losses]).double(), torch.stack([*weights])
    if is_sum:
        return torch.stack([values.sum(), counts.sum(), nothing, nothing, broken])
    # A mean over no targets may be NaN, and mustn't count if other micro-batches have targets.
    has_any = counts > 0
    total = torch.where(has_any, values * counts, 0.0).sum()
    empty = torch.where(has_any, 0.0, values).sum()
    return torch.stack([total, counts.sum(), empty, (~has_any).double().sum(), broken])


def without_sums(row: Tensor) -> Tensor:
    """Return a rank's row without the sums that another rank reports; gradients still count."""
    row = row.clone()
    row[:2], row[NUM_TOTALS:] = 0, 0
    return row


class NonfiniteGradients(Choice):
    """What to do about gradients that aren't finite."""

    ERROR = "error"
    SKIP = "skip"


def has_nonfinite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return NaN if any element is NaN or infinite, else 0.0, without waiting for the device."""
    # A sum keeps NaN and infinity, and reads each tensor once. Small tensors cost calls, not bytes.
    small, sums = [], []
    for item in tensors:
        if item.numel() <= _SMALL_NUMEL:
            small.append(item)
        else:
            sums.append(item.sum(dtype=torch.float32))
    if small:
        line: Tensor = _flatten_dense_tensors(small)  # type: ignore[no-untyped-call]
        sums.append(line.sum(dtype=torch.float32))
    if not sums:
        return torch.zeros((), dtype=torch.float64, device=device)
    total = torch.stack(sums).double().sum() if len(sums) > 1 else sums[0].double()
    return total * 0.0


def answer_nonfinite(found: str, answer: NonfiniteGradients, *, is_late: bool) -> None:
    """Raise or warn, as the user chose; called by every rank alike.

    Args:
        found: Describes the gradients; the beginning of the message.
        answer: The user's choice.
        is_late: Whether the optimizer has already stepped, with zeros in place of the gradients.
    """
    if answer is NonfiniteGradients.ERROR:
        since = (
            "The step on them took zeros in their place"
            if is_late
            else "Nothing was changed by them"
        )
        raise StepError(
            f"Gradients of {found} {since}. Look for a division by zero or an "
            'overflow in the loss or the layers; HeteroStrategy(nonfinite_gradients="skip") leaves '
            "such iterations out."
        )
    warnings.warn(f"Gradients of {found} This iteration is left out.", stacklevel=2)


class LateNumbers:
    """Lets a host check numbers of its device without waiting for them.

    If a host reads a number that its device hasn't computed yet, the host waits, and then the
    device has no work. So numbers that only decide whether a run may go on are checked one
    iteration late, when they have arrived. On a CPU they are checked at once. All ranks make the
    same calls with the same numbers, so all raise the same error in the same iteration.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_late = device.type != "cpu"
        """Whether `judge` leaves the check to the next `settle`."""
        self._pending: list[tuple[Tensor, torch.cuda.Event | None, Callable[[Tensor], None]]] = []

    def judge(
        self, numbers: Tensor, judgement: Callable[[Tensor], None], *, now: bool = False
    ) -> None:
        """Call `judgement` with the numbers on the CPU; `now` waits for the device."""
        if now or not self.is_late:
            judgement(numbers.cpu())
            return
        arriving = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda)
        arriving.copy_(numbers.detach(), non_blocking=True)
        arrived = torch.cuda.current_stream().record_event() if numbers.is_cuda else None
        self._pending.append((arriving, arrived, judgement))

    def settle(self) -> None:
        """Call the functions that `judge` has left for later; raises what they raise."""
        pending, self._pending = self._pending, []
        for numbers, arrived, judgement in pending:
            if arrived is not None:
                arrived.synchronize()
            judgement(numbers)
