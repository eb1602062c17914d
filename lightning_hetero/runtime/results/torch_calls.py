"""Calls of torch's functions as a watch sees them: names, arguments, and what isn't a tensor."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["NO_NUMBERS", "NO_TENSORS", "TorchCall", "integers_among", "name_of", "tensors_among"]

NO_NUMBERS = frozenset((torch.Size, torch.dtype, torch.device, bool, int, str))
"""What questions about a tensor's form are answered with."""
NO_TENSORS = NO_NUMBERS | {float, type(None)}
"""What a function gets besides tensors."""


class TorchCall(NamedTuple):
    """A call of a torch function."""

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def argument(self, place: int, name: str, otherwise: Any = None) -> Any:
        """Return an argument that is given by its place or by its name."""
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
        if isinstance(value, Tensor):
            found += (value,)
        elif isinstance(value, list | tuple):
            found += tensors_among(value)
    return found


def integers_among(values: Iterable[Any]) -> list[int]:
    """Return the whole numbers among values, also those in lists and tuples."""
    nested = [item if isinstance(item, list | tuple) else (item,) for item in values]
    return [item for items in nested for item in items if isinstance(item, int)]
