"""Sizes of a parameter that is a slice here: integers of the whole that carry the slice's size.

Hooks read `p.shape` and `p.numel()` for two purposes: as numbers, which must be those of the whole,
and to make a tensor like `p`, which must be as large as the slice. So each size is an integer with
the slice's as an attribute: Python computes with the first, torch functions get the second.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.runtime.slices.known_by_shape import SIZES

__all__ = ["SliceSize", "for_slice", "size_of_whole"]


class SliceSize(int):
    """A size of a whole parameter, with that of the slice.

    ::

        rows = SliceSize.of(8, own=3)
        assert rows * 2 == 16 and (rows * 2).own == 6
    """

    own: int
    """Size of the slice."""
    parameter: str
    """The parameter's name."""

    @classmethod
    def of(cls, whole: int, *, own: int, parameter: str = "") -> "SliceSize":
        """Return the size `whole` of a parameter that carries its slice's size `own`."""
        made = cls(whole)
        made.own, made.parameter = own, parameter
        return made

    def __add__(self, other: int) -> Any:
        """Add to both sizes; with floats, operators return plain numbers of the whole."""
        return self._computed(operator.add, other)

    def __mul__(self, other: int) -> Any:
        return self._computed(operator.mul, other)

    def __sub__(self, other: int) -> Any:
        return self._computed(operator.sub, other)

    def __floordiv__(self, other: int) -> Any:
        return self._computed(operator.floordiv, other)

    __radd__, __rmul__ = __add__, __mul__

    def _computed(self, operation: Callable[[Any, Any], Any], other: Any) -> Any:
        result = operation(int(self), int(other) if isinstance(other, SliceSize) else other)
        if not isinstance(result, int):
            return result
        own = other.own if isinstance(other, SliceSize) else other
        return SliceSize.of(result, own=operation(self.own, own), parameter=self.parameter)


def size_of_whole(
    func: Any, own: Any, args: Any, kwargs: Any, shape: tuple[int, ...], parameter: str
) -> Any:
    """Return the answer to a question for a slice's sizes: those of the whole, as `SliceSize`.

    Args:
        func: One of `SIZES`.
        own: The answer for the slice.
        args: Arguments of `func`, the slice first.
        kwargs: Its keyword arguments.
        shape: Shape of the whole.
        parameter: The parameter's name.
    """
    assert func in SIZES
    slice_: Tensor = args[0]
    whole = func(torch.empty(shape, dtype=slice_.dtype, device="meta"), *args[1:], **kwargs)
    if isinstance(own, tuple):
        pairs = zip(whole, own, strict=True) if len(whole) == len(own) else ()
        both = [SliceSize.of(i, own=j, parameter=parameter) for i, j in pairs]
        return type(own)(both) if both else whole
    return SliceSize.of(whole, own=own, parameter=parameter)


def for_slice(value: Any) -> Any:
    """Return an argument of a torch function with each `SliceSize` replaced by the slice's size."""
    if isinstance(value, SliceSize):
        return value.own
    if isinstance(value, list | tuple):
        items = [for_slice(item) for item in value]
        return items if type(value) is list else tuple(items)
    if isinstance(value, slice):
        return slice(for_slice(value.start), for_slice(value.stop), for_slice(value.step))
    return value
