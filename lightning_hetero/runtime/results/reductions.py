"""How numbers of micro-batches become the number of the whole iteration, as far as it is known.

Behind the layers, and before them, torch's functions are watched: a full mean is a mean over so
many elements, a sum over a sum is a mean over the divisor, a mean times a constant is a mean, and
so on. What these rules don't cover is `UNKNOWN`, never guessed here. They take it that dim 0 counts
samples (or tokens) and that samples don't meet other than in reductions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.core.errors import StepError

__all__ = [
    "CONSTANT",
    "NO_RATIO",
    "UNKNOWN",
    "Count",
    "Kind",
    "Reduction",
    "Reductions",
    "as_weight",
    "check_ratios",
    "ends_of",
    "ratio_of",
]

Count = Tensor | float


class Kind(StrEnum):
    """What a number is over the samples of a micro-batch."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    CONSTANT = "constant"
    UNKNOWN = "unknown"
    MIXED = "a sum and something else"


@dataclass(frozen=True)
class Reduction:
    """What is known of one number."""

    kind: Kind
    count: Count = 0
    """What a mean averages over, or how many a sum adds."""
    value: Count = 0
    """The number itself, for a sum without the floor that was put under it."""
    others: tuple[Count, ...] = ()
    """What further means average over that were added to this one."""


CONSTANT = Reduction(Kind.CONSTANT)
"""What doesn't depend on the samples."""
UNKNOWN = Reduction(Kind.UNKNOWN)
"""What no rule covers."""
_MIXED = Reduction(Kind.MIXED)

NO_RATIO = (float("inf"), -float("inf"))
"""The least and the largest of no ratios."""

_SMALL = 1e-3
"""A number up to this that is added to a divisor only keeps it from being 0."""
_LINEAR = (Kind.MEAN, Kind.SUM)
_REDUCTIONS = {
    "sum": Kind.SUM,
    "nansum": Kind.SUM,
    "count_nonzero": Kind.SUM,
    "mean": Kind.MEAN,
    "amax": Kind.MAX,
    "max": Kind.MAX,
    "amin": Kind.MIN,
    "min": Kind.MIN,
}
# fmt: off
_OTHER_REDUCTIONS = {
    "var", "std", "norm", "vector_norm", "prod", "median", "logsumexp", "nanmean", "nanmedian",
    "quantile", "cumsum",
}
_ALONG = {"softmax", "log_softmax", "normalize", "sort", "argsort"}
_KEEPING = {
    "float", "double", "half", "bfloat16", "to", "type", "type_as", "detach", "clone", "contiguous",
    "squeeze", "unsqueeze", "reshape", "view", "flatten", "ravel", "expand", "long", "int", "cpu",
    "cuda", "item", "nan_to_num", "neg", "alias", "get",
}
_FACTORIES = {
    "tensor", "as_tensor", "scalar_tensor", "zeros", "ones", "full", "arange", "zeros_like",
    "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor",
}
# fmt: on
_WITH_DIMS = _REDUCTIONS.keys() | _OTHER_REDUCTIONS | _ALONG
_FLOORS = {"clamp", "clamp_min", "clip", "maximum", "max"}
_JOINING = {"stack", "cat", "hstack", "concat", "concatenate"}
_PRODUCTS = {"matmul", "mm", "rmatmul", "cdist"}


class Reductions:
    """What is known of the numbers of one micro-batch; others are not in it."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Reduction]] = {}
        self._stacked: dict[int, Tensor] = {}
        """Tensors whose dim 0 counts what was stacked, not samples."""

    def of(self, value: Any) -> Reduction | None:
        """Return what is known of a tensor or number; None if it is no reduction."""
        found = self._known.get(id(value))
        if found is not None:
            return found[1]
        return CONSTANT if isinstance(value, nn.Parameter) else None

    def keep(self, value: Any, reduction: Reduction | None) -> None:
        """Remember what is known of a function's result."""
        if reduction is not None:
            # With the object, so that no other gets its id.
            self._known[id(value)] = value, reduction
        else:
            self._known.pop(id(value), None)

    def snapshot(self) -> dict[int, tuple[Any, Reduction]]:
        """Return what is known now."""
        return dict(self._known)

    def restore(self, known: dict[int, tuple[Any, Reduction]]) -> None:
        """Know what was known then, and nothing more."""
        self._known = dict(known)

    def follow(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Look at a call of a torch function."""
        name = getattr(func, "__name__", "").strip("_")
        if isinstance(result, Tensor):
            try:
                judged = self._judge(name, args, kwargs, result)
            except (TypeError, ValueError, IndexError):
                # Arguments take forms that no rule expects, which is no reason to end a step.
                judged = UNKNOWN
            self.keep(result, judged)
        elif isinstance(result, float) and name in ("item", "float"):
            self.keep(result, self.of(args[0]))

    def _judge(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor
    ) -> Reduction | None:
        tensors = list(_tensors((*args, *kwargs.values())))
        known = [self.of(tensor) for tensor in tensors]
        if name in _FACTORIES or (known and all(item is CONSTANT for item in known)):
            return CONSTANT
        if all(item is None or item is CONSTANT for item in known):
            if self._is_of_stacked(name, tensors, args, kwargs, result):
                return None
            if tensors and result.ndim and not any(tensor.ndim for tensor in tensors):
                return UNKNOWN  # Of numbers of which nothing is known: they are no samples.
            return _reduce(name, tensors, known, args, kwargs, result) if tensors else None
        if UNKNOWN in known and not any(item and item.kind is Kind.SUM for item in known):
            return UNKNOWN
        first = known[0]
        if len(tensors) == 1 and first is not None:
            kept = _alone(name, first, args, kwargs)
            if kept is not None:
                return kept
        if name in _FLOORS and first is not None and first.kind is Kind.SUM:
            return first if all(item is CONSTANT for item in known[1:]) else UNKNOWN
        if name in _JOINING:
            return _fold([item or UNKNOWN for item in known])
        return self._combine(name, args, kwargs)

    def _is_of_stacked(
        self,
        name: str,
        tensors: Sequence[Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Tensor,
    ) -> bool:
        """Return whether a function keeps the samples apart because dim 0 of its input is none."""
        if name == "stack" and kwargs.get("dim", args[1] if len(args) > 1 else 0) == 0:
            self._stacked[id(result)] = result
        if name not in _WITH_DIMS or len(tensors) != 1 or id(tensors[0]) not in self._stacked:
            return False
        dims = _dims(args, kwargs, tensors[0].ndim)
        return dims is not None and 1 not in dims

    def _combine(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Reduction:
        pair = (*args, *kwargs.values())[:2]
        if len(pair) < 2:
            return UNKNOWN
        reflected = name.startswith("r") and name[1:] in _OPERATIONS
        operation = _OPERATIONS.get(name[1:] if reflected or name[:1] == "i" else name)
        operation = operation or _OPERATIONS.get(name)
        if operation is None:
            return UNKNOWN
        left, right = (self._operand(item) for item in (pair[::-1] if reflected else pair))
        return operation(left, right)

    def _operand(self, value: Any) -> Reduction:
        if isinstance(value, Tensor):
            return self.of(value) or UNKNOWN
        # Whole numbers may count what is in this micro-batch.
        return self.of(value) or Reduction(Kind.CONSTANT, count=type(value) is int, value=value)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _reduce(
    name: str,
    tensors: Sequence[Tensor],
    known: Sequence[Reduction | None],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Tensor,
) -> Reduction | None:
    """Judge a function of elements that are no reductions yet."""
    source = tensors[0]
    if len(tensors) == 2 and known[1] is None and _is_product(name, args, tensors[1]):
        return UNKNOWN  # Every sample meets every other.
    if len(tensors) > 1 or source.ndim == 0 or name not in _WITH_DIMS:
        return None
    dims = _dims(args, kwargs, source.ndim)
    if name in _OTHER_REDUCTIONS and (dims is None or 0 in dims):
        return UNKNOWN
    if name in _ALONG and dims is not None and 0 in dims:
        return UNKNOWN
    if name not in _REDUCTIONS or (dims is not None and 0 not in dims):
        return None
    count = source.numel() if dims is None else source.shape[0]
    return Reduction(_REDUCTIONS[name], count=count, value=result.detach())


def _is_product(name: str, args: Sequence[Any], other: Tensor) -> bool:
    """Whether a function of two tensors brings the rows of one together with all of the other."""
    if name == "einsum" and isinstance(args[0], str):
        left, _, right = args[0].replace(" ", "").partition("->")[0].partition(",")
        return left[:1] != right[:1]
    return name in _PRODUCTS and other.ndim == 2


def _dims(args: Sequence[Any], kwargs: Mapping[str, Any], ndim: int) -> tuple[int, ...] | None:
    """Return the dims that a reduction runs over; None for all of them."""
    found = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    if isinstance(found, int):
        found = (found, *(item for item in args[2:] if type(item) is int))
    if not isinstance(found, list | tuple) or not found:
        return None
    return tuple(int(item) % ndim for item in found)


def _alone(
    name: str, known: Reduction, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Reduction | None:
    """Judge a function of one reduction and no other tensor."""
    if name in _KEEPING and (name != "neg" or known.kind in _LINEAR):
        return known
    if name in _REDUCTIONS and len(args) + len(kwargs) == 1:
        # Of a vector of such numbers.
        kind = _REDUCTIONS[name]
        return known if known.kind is kind or {known.kind, kind} <= set(_LINEAR) else UNKNOWN
    return None


def _fold(items: Sequence[Reduction]) -> Reduction:
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
    if left.kind is not right.kind or left.kind not in _LINEAR:
        return UNKNOWN
    if left.kind is Kind.SUM:
        return replace(left, value=left.value + right.value)
    return replace(left, others=(*left.others, right.count, *right.others))


def _multiply(left: Reduction, right: Reduction) -> Reduction:
    if left.kind is Kind.CONSTANT:
        left, right = right, left
    if right.kind is not Kind.CONSTANT or left.kind not in (*_LINEAR, Kind.MIXED, Kind.CONSTANT):
        return UNKNOWN
    if right is not CONSTANT and not isinstance(right.value, Tensor) and right.value == 0:
        return CONSTANT  # It only lets gradients be zeros instead of none.
    if left.kind is Kind.SUM and _may_average(left, right):
        return UNKNOWN
    # A mean times a whole number may be a sum by hand.
    return UNKNOWN if left.kind is Kind.MEAN and right.count and right.value != 1 else left


def _may_average(total: Reduction, factor: Reduction) -> bool:
    """Return whether a factor may be one over the samples or elements of this micro-batch."""
    if not isinstance(factor.value, float) or not 0 < factor.value < 1:
        return False
    divisor, count = round(1 / factor.value), total.count
    whole = abs(divisor * factor.value - 1) < 1e-9
    return whole and not isinstance(count, Tensor) and count % divisor == 0


def _divide(left: Reduction, right: Reduction) -> Reduction:
    if right.kind is Kind.CONSTANT:
        return left if left.kind in (Kind.MEAN, Kind.CONSTANT) else UNKNOWN
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


_OPERATIONS: dict[str, Callable[[Reduction, Reduction], Reduction]] = {
    **dict.fromkeys(("add", "sub", "subtract"), _add),
    **dict.fromkeys(("mul", "multiply"), _multiply),
    **dict.fromkeys(("div", "truediv", "true_divide", "divide"), _divide),
}


def as_weight(count: Count, device: torch.device) -> Tensor:
    """Return a count as a float64 tensor without waiting for the device."""
    if isinstance(count, Tensor):
        return count.detach().to(device=device, dtype=torch.float64)
    return torch.tensor(float(count), dtype=torch.float64, device=device)


def ratio_of(others: Sequence[Count], weight: Tensor) -> list[Tensor]:
    """Return per how much of `weight` the other means of a sum average, if there are any."""
    if not others:
        return []
    return [torch.stack([as_weight(item, weight.device) for item in others]).sum() / weight]


def ends_of(ratios: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the least and the largest ratio; 0 / 0 is none."""
    if not ratios:
        return list(torch.tensor(NO_RATIO, dtype=torch.float64, device=device))
    least, largest = NO_RATIO
    return [
        torch.stack([ratio.nan_to_num(nan=least, posinf=least) for ratio in ratios]).amin(),
        torch.stack([ratio.nan_to_num(nan=largest, posinf=least) for ratio in ratios]).amax(),
    ]


def check_ratios(least: Tensor, largest: Tensor, what: str) -> None:
    """Refuse a sum of means over different targets whose shares differ between micro-batches.

    Raises:
        StepError: One weight can't fit all of them; on every rank, if all call it.
    """
    if not least.numel():
        return
    low, high = float(least.min()), float(largest.max())
    if low < high * (1 - 1e-6) or high == float("inf"):
        raise StepError(
            f"The {what} is a sum of means over different numbers of targets: {low:g} of one for "
            f"one of the other in a micro-batch, {high:g} in another, so no weight of micro-batches"
            " gives what one device would. Take all means over the same targets, or return sums "
            '(loss_reduction="sum"); loss_reduction="mean" takes the first mean\'s weight.'
        )
