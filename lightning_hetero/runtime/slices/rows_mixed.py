"""Tell which torch functions mix the rows of a tensor, or depend on their positions.

Their results may be as large as the slice, so shapes don't show it (`whole_shapes`). A row is one
index of the dim that is cut.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.runtime.leaves import tree_leaves

__all__ = ["mixes_rows"]

# fmt: off
_ALONG = {
    "cumsum": (1, None), "cumprod": (1, None), "logcumsumexp": (1, None), "cummax": (1, None),
    "cummin": (1, None), "softmax": (1, None), "log_softmax": (1, None), "softmin": (1, None),
    "flip": (1, None), "sort": (1, -1), "argsort": (1, -1), "normalize": (2, 1),
    "renorm": (2, None), "roll": (2, None), "diff": (2, -1), "select": (1, None),
    "narrow": (1, None), "index_select": (1, None), "index_fill": (1, None),
    "index_copy": (1, None), "index_add": (1, None), "index_reduce": (1, None),
    "gather": (1, None), "scatter": (1, None), "scatter_add": (1, None),
    "scatter_reduce": (1, None), "take_along_dim": (2, None), "unbind": (1, 0), "split": (2, 0),
    "split_with_sizes": (2, 0), "chunk": (2, 0), "tensor_split": (2, 0), "unfold": (1, None),
    "fliplr": (1, 1), "flipud": (1, 0), "msort": (1, 0), "vsplit": (2, 0), "hsplit": (2, 1),
    "fft_fft": (2, -1), "fft_ifft": (2, -1), "glu": (1, -1), "gumbel_softmax": (4, -1),
}
"""Functions along dims: the position of the argument `dim`, and its default."""
_ACROSS = {"renorm"}
"""Those of them that run along all dims but the given one."""
_BY_PLACE = {"tril", "triu", "fill_diagonal", "diagonal", "diag", "trace", "rot90", "t"}
"""Functions that depend on positions in a matrix."""
_BY_NUMBER = {"take", "put", "index_put", "masked_scatter", "as_strided"}
"""Functions that depend on positions among all elements."""
_BY_LAST_DIMS = {"layer_norm", "rms_norm"}
_OF_SIGNALS = ("fft_", "conv", "group_norm", "batch_norm", "instance_norm", "interpolate")
# fmt: on


def mixes_rows(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], dim: int | None) -> bool:
    """Return whether a function mixes the rows of its first argument, or uses their positions.

    Args:
        name: Name of the function.
        args: Its arguments, a slice first.
        kwargs: Its keyword arguments.
        dim: The dim along which the slice is cut; None if unknown, then any dim may be it.
    """
    ndim: int = args[0].ndim
    if name in ("getitem", "setitem"):
        return _chooses(args[1], ndim, dim)
    if name in _BY_NUMBER or (name.startswith(_OF_SIGNALS) and name not in _ALONG):
        return True
    if name in _BY_PLACE:
        return ndim > 1
    if name in _BY_LAST_DIMS:
        normalized = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
        return dim is None or dim >= ndim - len(tree_leaves(normalized))
    if name not in _ALONG or not ndim:
        return False
    dims = _dims_of(name, args, kwargs)
    if dim is None or any(type(item) is not int for item in dims):
        return True
    return (dim not in {item % ndim for item in dims}) == (name in _ACROSS)


def _dims_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    place, usual = _ALONG[name]
    given = next((kwargs[key] for key in ("dim", "dims", "axis") if key in kwargs), args[place:])
    dims = tree_leaves(given if name == "flip" or not args[place:] else args[place])
    return dims or [usual]


def _chooses(index: Any, ndim: int, dim: int | None) -> bool:
    """Whether an index selects positions of the dim that is cut; of any dim if that is None."""
    items = list(index) if isinstance(index, tuple) else [index]
    if dim is None:
        return not all(_takes_all(item) for item in items)
    num_taken = sum(_num_dims(item) for item in items)
    first = 0
    for item in items:
        width = ndim - num_taken if item is Ellipsis else _num_dims(item)
        if first <= dim < first + width:
            return not _takes_all(item)
        first += width
    return False


def _num_dims(item: Any) -> int:
    """Return how many dims of a tensor an item of an index is for."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if _is_mask(item) else 1


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype is torch.bool


def _takes_all(item: Any) -> bool:
    is_all = item is None or item is Ellipsis or _is_mask(item)
    return is_all or (isinstance(item, slice) and item == slice(None))
