"""Tell where a function of two tensors brings the rows of one together with all of the other.

By names and shapes alone: no value is read.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["PRODUCTS", "is_of_each_with_each", "is_outer", "is_product"]

PRODUCTS = {"matmul", "mm", "rmatmul", "cdist", "linear"}
"""Names of functions whose second matrix may be samples, too."""


def is_product(name: str, args: Sequence[Any], other: Tensor) -> bool:
    """Whether a function of two tensors brings the rows of one together with all of the other."""
    if name == "einsum" and isinstance(args[0], str):
        left, _, right = args[0].replace(" ", "").partition("->")[0].partition(",")
        return left[:1] != right[:1]
    return name in PRODUCTS and other.ndim == 2


def is_of_each_with_each(name: str, left: Tensor, right: Tensor) -> bool:
    """Whether it is a product of rows with rows, or over rows, as shapes have it."""
    if name == "cdist" or left.ndim != 2:
        return name == "cdist"
    num_others = right.shape[0 if name in ("einsum", "linear") else 1]
    is_over_rows = name not in ("einsum", "linear") and left.stride(0) < left.stride(1)
    return left.shape[0] == num_others or is_over_rows


def is_outer(left: Tensor, right: Tensor) -> bool:
    """Whether broadcasting makes as many columns of one tensor's rows as the other has rows."""
    ndim = max(left.ndim, right.ndim)
    if ndim < 2:
        return False
    (row, column), (other_row, other_column) = (
        ((1,) * (ndim - tensor.ndim) + tensor.shape)[:2] for tensor in (left, right)
    )
    is_column = column == other_row == 1 and row == other_column
    is_row = row == other_column == 1 and column == other_row
    return max(row, column) > 1 and (is_column or is_row)
