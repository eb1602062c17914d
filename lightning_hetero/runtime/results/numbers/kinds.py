"""Kinds of numbers over samples, how arithmetic changes them, and how to join micro-batches' ones.

A mean plus a mean is a sum of means, a sum divided by a sum is a mean over the divisor, a mean
times a constant is a mean, and so on. Numbers that no rule covers are `UNKNOWN`, never guessed
here. Numbers that need all samples of a batch at once, such as a root of their mean or products of
samples with each other, are `TOGETHER`: no weights of micro-batches give them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from lightning_hetero.core.errors import StepError

__all__ = [
    "CONSTANT",
    "JOINABLE",
    "LINEAR",
    "NO_RATIO",
    "OPERATIONS",
    "TOGETHER",
    "UNKNOWN",
    "WRITTEN",
    "Count",
    "Kind",
    "Reduction",
    "as_weight",
    "check_ratios",
    "ends_of",
    "fold",
    "join_values",
    "operation_called",
    "ratio_of",
]

Count = Tensor | float


class Kind(StrEnum):
    """Ways in which a number may sum up the samples of a micro-batch."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    CONSTANT = "constant"
    UNKNOWN = "unknown"
    MIXED = "a sum and something else"
    TOGETHER = "of all samples together"


@dataclass(frozen=True)
class Reduction:
    """The facts known of one number."""

    kind: Kind
    count: Count = 0
    """Number of elements that a mean averages over, or that a sum adds."""
    value: Count = 0
    """The number itself; for a sum its value before a floor such as `clamp` was applied."""
    others: tuple[Count, ...] = ()
    """The counts of further means that were added to this one."""
    num_places: int = 0
    """Targets of a loss function, whether they count or not; 0 for other numbers."""


CONSTANT = Reduction(Kind.CONSTANT)
"""For a number that doesn't depend on the samples."""
WRITTEN = Reduction(Kind.CONSTANT, value=1)
"""For a number written in the step's code, which is therefore the batch's, too."""
UNKNOWN = Reduction(Kind.UNKNOWN)
"""For a number that no rule covers."""
TOGETHER = Reduction(Kind.TOGETHER)
"""For a number that mixes samples of a batch, also for rows that other samples have changed."""
_MIXED = Reduction(Kind.MIXED)

NO_RATIO = (float("inf"), -float("inf"))
"""The least and the largest of no ratios."""

_SMALL = 1e-3
"""Largest constant that, added to a divisor, is taken only to keep it from being 0."""
LINEAR = (Kind.MEAN, Kind.SUM)
"""Kinds that a constant factor keeps."""
JOINABLE = (*LINEAR, Kind.MAX, Kind.MIN)
"""Kinds whose numbers of micro-batches make the number of the batch."""


def fold(items: Sequence[Reduction]) -> Reduction:
    """Return what is known of a sum of numbers."""
    total = items[0]
    for item in items[1:]:
        total = _add(total, item)
    return total


def _add(left: Reduction, right: Reduction) -> Reduction:
    if left.kind is Kind.CONSTANT:
        left, right = right, left
    if right.kind is Kind.CONSTANT:
        small = not isinstance(right.value, Tensor) and abs(right.value) <= _SMALL
        keeps = left.kind is not Kind.SUM or (small and right is not CONSTANT)
        return left if keeps else _MIXED
    if (left.kind is Kind.SUM) is not (right.kind is Kind.SUM) or Kind.MIXED in (
        left.kind,
        right.kind,
    ):
        return _MIXED
    if left.kind is not right.kind or left.kind not in LINEAR:
        return UNKNOWN
    if left.kind is Kind.SUM:
        return replace(left, value=left.value + right.value)
    return replace(left, others=(*left.others, right.count, *right.others))


def _multiply(left: Reduction, right: Reduction) -> Reduction:
    if left.kind is Kind.CONSTANT:
        left, right = right, left
    if right.kind is not Kind.CONSTANT or left.kind not in (*LINEAR, Kind.MIXED, Kind.CONSTANT):
        return UNKNOWN
    if right is not CONSTANT and not isinstance(right.value, Tensor) and right.value == 0:
        return CONSTANT  # The product with 0 only makes gradients zeros instead of None.
    if left.kind is Kind.SUM and _may_average(left, right):
        return UNKNOWN
    # A mean times a whole number may be a sum by hand.
    return UNKNOWN if left.kind is Kind.MEAN and _may_count(right) else left


def _may_count(factor: Reduction) -> bool:
    """Return whether a constant may count samples or elements of this micro-batch."""
    return factor is not CONSTANT and bool(factor.count)


def _may_average(total: Reduction, factor: Reduction) -> bool:
    """Return whether a factor may be 1 / (number of this micro-batch's samples or elements)."""
    if not isinstance(factor.value, float) or not 0 < factor.value < 1:
        return False
    divisor, count = round(1 / factor.value), total.count
    whole = abs(divisor * factor.value - 1) < 1e-9
    return whole and not isinstance(count, Tensor) and count % divisor == 0


def _divide(left: Reduction, right: Reduction) -> Reduction:
    if right.kind is Kind.CONSTANT:
        # Numbers on a device aren't compared: the host would wait for them.
        is_known = not (isinstance(left.count, Tensor) or isinstance(right.value, Tensor))
        counts = left.kind is Kind.SUM and is_known and _may_count(right)
        if counts and right.value == left.count:
            return Reduction(Kind.MEAN, count=left.count)
        keeps = left.kind is Kind.CONSTANT or (left.kind is Kind.MEAN and not _may_count(right))
        return left if keeps else UNKNOWN
    if left.kind is right.kind is Kind.SUM:
        return Reduction(Kind.MEAN, count=right.value)
    if left.kind is right.kind is Kind.MEAN and not (left.others or right.others):
        same = left.count is right.count or (
            not isinstance(left.count, Tensor)
            and not isinstance(right.count, Tensor)
            and left.count == right.count
        )
        return Reduction(Kind.MEAN, count=right.value * right.count) if same else UNKNOWN
    return UNKNOWN


OPERATIONS: dict[str, Callable[[Reduction, Reduction], Reduction]] = {
    **dict.fromkeys(("add", "sub", "subtract"), _add),
    **dict.fromkeys(("mul", "multiply"), _multiply),
    **dict.fromkeys(("div", "truediv", "true_divide", "divide"), _divide),
}
"""By the names of torch's functions: what is known of the result of two numbers."""


def operation_called(
    name: str,
) -> tuple[Callable[[Reduction, Reduction], Reduction] | None, bool]:
    """Return the operation of a function such as `add`, `iadd` or `radd`; whether it is reflected.

    A reflected operation has its operands swapped.
    """
    is_reflected = name.startswith("r") and name[1:] in OPERATIONS
    found = OPERATIONS.get(name[1:] if is_reflected or name[:1] == "i" else name)
    return found or OPERATIONS.get(name), is_reflected


def join_values(kind: str, values: Tensor, weights: Tensor) -> Tensor:
    """Return the number of a batch from those of its micro-batches, along dim 0.

    Args:
        kind: One of `JOINABLE`; anything else is averaged, as a mean is.
        values: (num_microbatches, ...).
        weights: The count that each mean averages over, (num_microbatches,).
    """
    if kind == Kind.SUM:
        return values.sum(0)
    if kind in (Kind.MAX, Kind.MIN):
        return values.amax(0) if kind == Kind.MAX else values.amin(0)
    shaped = weights.reshape(-1, *[1] * (values.ndim - 1))
    # A weight of 0 may belong to a NaN, such as the mean of no targets.
    weighted = torch.where(shaped > 0, values * shaped, 0.0).sum(0)
    total = weights.sum()
    return torch.where(total > 0, weighted / total, values.mean(0))


def as_weight(count: Count, device: torch.device) -> Tensor:
    """Return a count as a float64 tensor without waiting for the device."""
    if isinstance(count, Tensor):
        return count.detach().to(device=device, dtype=torch.float64)
    # Filled there: a copy to an accelerator would wait for it.
    return torch.full((), float(count), dtype=torch.float64, device=device)


def ratio_of(others: Sequence[Count], weight: Tensor) -> list[Tensor]:
    """Return the counts of a sum's other means, added up and divided by `weight`; [] without any.

    Each count has a factor of its own, so that different counts with the same sum differ.
    """
    if not others:
        return []
    counts = [as_weight(item, weight.device) for item in others]
    counts[1:] = [count * math.sqrt(place) for place, count in enumerate(counts[1:], start=2)]
    return [torch.stack(counts).sum() / weight]


def ends_of(ratios: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the least and the largest ratio, `NO_RATIO` without any; 0 / 0 counts as none."""
    if not ratios:
        return [as_weight(end, device) for end in NO_RATIO]
    least, largest = NO_RATIO
    return [
        torch.stack([ratio.nan_to_num(nan=least, posinf=least) for ratio in ratios]).amin(),
        torch.stack([ratio.nan_to_num(nan=largest, posinf=least) for ratio in ratios]).amax(),
    ]


def check_ratios(low: float, high: float, what: str) -> None:
    """Refuse a sum of means over different targets whose shares differ between micro-batches.

    Args:
        low: The least ratio of all; see `ends_of`.
        high: The largest.
        what: What the sum is.

    Raises:
        StepError: One weight can't fit all of them; on every rank, if all call it.
    """
    if low < high * (1 - 1e-6) or high == float("inf"):
        raise StepError(
            f"The {what} is a sum of means over different numbers of targets: their shares differ "
            "between micro-batches, or some of these lack a group of samples whose mean others add "
            "(`if mask.any(): ...`), so no weight of micro-batches gives what one device would. "
            "Take all means over the same targets, or return sums "
            '(loss_reduction="sum"); loss_reduction="mean" takes the first mean\'s weight.'
        )
