"""Where samples lie in a tensor: which functions move them, or take some of them by their places.

A mean over one sample out of a batch, or over the steps of sequences that have gone to the first
dim, has the form of a mean over samples and is none.
"""

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.runtime.results.numbers.torch_calls import TorchCall, integers_among

__all__ = [
    "CHOOSING",
    "TURNING",
    "TURNS",
    "chooses_samples",
    "gives_other_places",
    "sample_groupings",
    "takes_part",
    "turns_samples",
]

TURNING: frozenset[Any] = frozenset(
    getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")
)
"""Questions for a tensor that is turned."""
CHOOSING = {"topk", "kthvalue", "sort", "median", "nanmedian", "mode"}
"""Functions that return values and their indices along one dim, the last one unless told."""
TURNS = {"t", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis"}
"""Names of functions that give dims other places."""
_CUTTING = {
    **dict.fromkeys(("unbind", "select", "narrow"), 1),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), 2),
}
"""Functions that take parts along a dim, and the place of that argument."""


def turns_samples(source: Tensor, result: Tensor, num_samples: int, *, is_turned: bool) -> bool:
    """Whether one of `TURNS` moves samples from the first dim, or back there.

    Args:
        source: What it turns.
        result: What it has made.
        num_samples: Of the micro-batch.
        is_turned: Whether they aren't in the source's first dim.
    """
    if source.ndim < 2 or (result.shape[0], result.stride(0)) == (
        source.shape[0],
        source.stride(0),
    ):
        return False
    return is_turned or (source.shape[0] == num_samples and result.shape[0] != num_samples)


def takes_part(call: TorchCall, num_samples: int) -> bool:
    """Whether a function takes one of several samples, or some, by their places."""
    source = call.argument(0, "input")
    if not isinstance(source, Tensor) or not source.ndim or source.shape[0] != num_samples:
        return False
    if call.name == "getitem":
        index = call.args[1]
        first = index[0] if isinstance(index, tuple) and index else index
        if isinstance(first, slice):
            return len(range(*first.indices(num_samples))) != num_samples
        return type(first) is int
    place = _CUTTING.get(call.name)
    return place is not None and call.argument(place, "dim", 0) == 0


def chooses_samples(call: TorchCall, source: object) -> bool:
    """Whether a function with several results chooses along the first dim."""
    if not isinstance(source, Tensor) or not source.ndim:
        return False
    dim = call.argument(2 if call.name in ("topk", "kthvalue") else 1, "dim", -1)
    return type(dim) is int and dim % source.ndim == 0


def gives_other_places(call: TorchCall, source: Tensor, shuffles: Container[int]) -> bool:
    """Whether a function that changes an order gives samples the places of others.

    Args:
        call: The function's.
        source: The samples.
        shuffles: Ids of orders by chance.
    """
    name, args = call.name, call.args
    if name in ("getitem", "index_select"):
        index = args[-1][0] if isinstance(args[-1], tuple) and args[-1] else args[-1]
        is_first = name == "getitem" or call.argument(1, "dim", 0) == 0
        return is_first and id(call.kwargs.get("index", index)) in shuffles
    dims = call.kwargs.get("dims", args[1:] if name == "flip" else args[2:])
    dims = (dims,) if isinstance(dims, int) else integers_among(dims)
    return name == "flipud" or 0 in [dim % source.ndim for dim in dims]


def sample_groupings(
    shape: Sequence[int], num_samples: int, starts: Tensor | None
) -> list[tuple[int, Tensor]]:
    """Return the dims along which samples may lie, with the sample at each place.

    If shapes leave open which it is there are several.

    Args:
        shape: Of a tensor of the samples.
        num_samples: How many there are.
        starts: Where each begins, and the last one ends, if they are packed.
    """
    found: list[tuple[int, Tensor]] = []
    for dim in range(min(len(shape) - 1, 2)):
        places = torch.arange(shape[dim])
        if starts is not None:
            if shape[dim] == int(starts[-1]):
                return [(dim, torch.searchsorted(starts[1:-1].cpu(), places, right=True))]
        elif shape[dim] == num_samples:
            found.append((dim, places))
        elif dim == 0 and shape[0] % num_samples == 0:
            found += [(0, places % num_samples), (0, places // (shape[0] // num_samples))]
    return found
