"""Calls of torch functions as a watch sees them: names, arguments, and types that aren't tensors.

Names and shapes, without values, show whether a function of two tensors combines each row of one
with all rows of the other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = [
    "NO_NUMBERS",
    "NO_TENSORS",
    "PRODUCTS",
    "TorchCall",
    "integers_among",
    "is_of_each_with_each",
    "is_outer",
    "is_parameter",
    "is_product",
    "name_of",
    "tensors_among",
]

NO_NUMBERS = frozenset((torch.Size, torch.dtype, torch.device, bool, int, str))
"""Types of the answers to questions about a tensor's form."""
NO_TENSORS = NO_NUMBERS | {float, type(None)}
"""Types of the arguments that a function gets besides tensors."""
PRODUCTS = {"matmul", "mm", "rmatmul", "cdist", "linear"}
"""Names of functions whose second matrix may be samples, too."""


class TorchCall(NamedTuple):
    """A call of a torch function."""

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def argument(self, place: int, name: str, otherwise: Any = None) -> Any:
        """Return an argument that is given by its position or by its name."""
        return self.kwargs.get(name, self.args[place] if len(self.args) > place else otherwise)

    def tensors(self) -> list[Tensor]:
        """Return all tensors among the arguments."""
        return tensors_among((*self.args, *self.kwargs.values()))

    def dims(self, ndim: int) -> tuple[int, ...] | None:
        """Return the dims that a reduction runs over; None for all of them."""
        found = self.kwargs.get("axis", self.argument(1, "dim"))
        if isinstance(found, int):
            found = (found, *(item for item in self.args[2:] if type(item) is int))
        if not isinstance(found, list | tuple) or not found:
            return None
        return tuple(int(item) % ndim for item in found)


@lru_cache(maxsize=1024)
def name_of(func: Callable[..., Any]) -> str:
    """Return the name of a function without underscores around it."""
    return getattr(func, "__name__", "").strip("_")


def tensors_among(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among values, also those in lists and tuples."""
    found: list[Tensor] = []
    for value in values:
        if type(value) in NO_TENSORS:
            continue
        if type(value) is Tensor or isinstance(value, Tensor):
            found += (value,)
        elif isinstance(value, list | tuple):
            found += tensors_among(value)
    return found


def is_parameter(value: object) -> bool:
    """Whether a value is a parameter; as `isinstance`, which takes several times as long."""
    kind: Any = type(value)
    if kind is Tensor or kind is nn.Parameter:
        return kind is nn.Parameter
    return _is_kind_of(kind, nn.Parameter) or (
        _is_kind_of(kind, Tensor) and getattr(value, "_is_param", False)
    )


@lru_cache(maxsize=256)
def _is_kind_of(kind: type, base: type) -> bool:
    return issubclass(kind, base)


def integers_among(values: Iterable[Any]) -> list[int]:
    """Return the whole numbers among values, also those in lists and tuples."""
    nested = [item if isinstance(item, list | tuple) else (item,) for item in values]
    return [item for items in nested for item in items if isinstance(item, int)]


def is_product(name: str, args: Sequence[Any], other: Tensor) -> bool:
    """Whether a function of two tensors combines each row of one with all rows of the other."""
    if name == "einsum" and isinstance(args[0], str):
        left, _, right = args[0].replace(" ", "").partition("->")[0].partition(",")
        return left[:1] != right[:1]
    return name in PRODUCTS and other.ndim == 2


def is_of_each_with_each(name: str, left: Tensor, right: Tensor) -> bool:
    """Whether a product is of rows with rows, or sums over rows, judged by shapes."""
    if name == "cdist" or left.ndim != 2:
        return name == "cdist"
    num_others = right.shape[0 if name in ("einsum", "linear") else 1]
    is_over_rows = name not in ("einsum", "linear") and left.stride(0) < left.stride(1)
    return left.shape[0] == num_others or is_over_rows


def is_outer(left: Tensor, right: Tensor) -> bool:
    """Whether broadcasting combines each row of one tensor with each row of the other."""
    ndim = max(left.ndim, right.ndim)
    if ndim < 2 or left.shape == right.shape:
        return False
    (row, column), (other_row, other_column) = (
        ((1,) * (ndim - tensor.ndim) + tensor.shape)[:2] for tensor in (left, right)
    )
    is_column = column == other_row == 1 and row == other_column
    is_row = row == other_column == 1 and column == other_row
    return max(row, column) > 1 and (is_column or is_row)
