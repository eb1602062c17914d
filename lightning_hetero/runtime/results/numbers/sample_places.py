"""Positions of samples in tensors: functions that move them, or take some of them by position.

A mean over one sample of a batch, or over the time steps of sequences that were moved to the first
dim, looks like a mean over samples but is none.
"""

from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.runtime.callers import calling_frame, takes_written_rows
from lightning_hetero.runtime.results.numbers.torch_calls import (
    TorchCall,
    integers_among,
    tensors_among,
)

__all__ = [
    "CHOOSING",
    "TURNING",
    "TURNS",
    "SampleParts",
    "chooses_samples",
    "gives_other_places",
    "sample_groupings",
    "turns_samples",
]

TURNING: frozenset[Any] = frozenset(
    getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")
)
"""Getters of transposed tensors."""
CHOOSING = {"topk", "kthvalue", "sort", "median", "nanmedian", "mode"}
"""Functions that return values and their indices along one dim, the last one unless told."""
TURNS = {"t", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis"}
"""Names of functions that permute dims."""
_CUTTING = {
    **dict.fromkeys(("unbind", "select", "narrow"), 1),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), 2),
}
"""Functions that take parts along a dim, and the index of that argument."""
_TAKING = {"getitem", *_CUTTING}


def turns_samples(source: Tensor, result: Tensor, num_samples: int, *, is_turned: bool) -> bool:
    """Whether one of `TURNS` moves samples from the first dim, or back there.

    Args:
        source: Its argument.
        result: Its result.
        num_samples: Samples of the micro-batch.
        is_turned: Whether samples aren't along the source's first dim.
    """
    if source.ndim < 2 or (result.shape[0], result.stride(0)) == (
        source.shape[0],
        source.stride(0),
    ):
        return False
    return is_turned or (source.shape[0] == num_samples and result.shape[0] != num_samples)


class SampleParts:
    """The tensors of one micro-batch that are made of some of its samples, taken by position.

    Args:
        num_samples: Samples of the micro-batch.
    """

    def __init__(self, num_samples: int) -> None:
        self.are_any = False
        """Whether there are any."""
        self._num_samples = num_samples
        self._tensors: dict[int, tuple[Tensor, bool]] = {}
        """By id: tensors, and whether their samples' positions are written in the user's code."""

    def keep(self, tensor: Tensor, sources: Iterable[object]) -> None:
        """Note a tensor that is made of sources, of which some are parts."""
        self.are_any = True
        self._tensors[id(tensor)] = tensor, self.are_written(sources)

    def take(self, call: TorchCall, results: Sequence[object]) -> None:
        """Note the results of a function if it takes some of all samples."""
        if call.name not in _TAKING or not self._is_of_all(call):
            return
        is_written = self._takes_written(call)
        if is_written or self._takes(call):
            for item in tensors_among(results):
                self.are_any = True
                self._tensors[id(item)] = item, is_written

    def has(self, values: Iterable[object]) -> bool:
        """Whether any of these are among them."""
        return any(id(value) in self._tensors for value in values)

    def are_written(self, values: Iterable[object]) -> bool:
        """Whether any are samples whose positions are written in the user's code, as in `x[0]`.

        Sums of others may be parts of a sum over all of them: `sum(x[i].sum() for i in ...)`.
        """
        return any(self._tensors.get(id(value), (None, False))[1] for value in values)

    def forget(self) -> None:
        """Forget all parts, and hold no objects of a step."""
        self._tensors, self.are_any = {}, False

    def _takes(self, call: TorchCall) -> bool:
        """Whether a function takes one of several samples, or some, by position."""
        if call.name == "getitem":
            first = _first_index(call)
            if isinstance(first, slice):
                return len(range(*first.indices(self._num_samples))) != self._num_samples
            return type(first) is int
        place = _CUTTING.get(call.name)
        return place is not None and call.argument(place, "dim", 0) == 0

    def _takes_written(self, call: TorchCall) -> bool:
        """Whether it takes rows by indices written in the user's code, and may leave out others.

        `x[:2]` leaves out none if the micro-batch has fewer samples.
        """
        if call.name != "getitem":
            return False
        first = _first_index(call)
        if isinstance(first, slice):
            is_part = bool(first.start) or first.step not in (None, 1)
            is_full = first.stop is None or not 0 < first.stop <= self._num_samples
            may_leave = is_part or not is_full
        else:
            may_leave = type(first) is int
        frame = calling_frame() if may_leave else None
        return frame is not None and takes_written_rows(frame)

    def _is_of_all(self, call: TorchCall) -> bool:
        source = call.argument(0, "input")
        return isinstance(source, Tensor) and source.shape[:1] == (self._num_samples,)


def _first_index(call: TorchCall) -> object:
    index = call.args[1]
    return index[0] if isinstance(index, tuple) and index else index


def chooses_samples(call: TorchCall, source: object) -> bool:
    """Whether a function with several results chooses along the first dim."""
    if not isinstance(source, Tensor) or not source.ndim:
        return False
    dim = call.argument(2 if call.name in ("topk", "kthvalue") else 1, "dim", -1)
    return type(dim) is int and dim % source.ndim == 0


def gives_other_places(call: TorchCall, source: Tensor, shuffles: Container[int]) -> bool:
    """Whether one of `REORDERING` changes the positions of samples.

    Args:
        call: The call of the function.
        source: The samples.
        shuffles: Ids of random permutations.
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
    """Return the dims along which samples may lie, each with the sample of each index, (size,).

    There are several if shapes don't show which one it is.

    Args:
        shape: Shape of a tensor of the samples.
        num_samples: Number of samples.
        starts: Where each begins, and the last one ends, if they are packed end to end.
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
