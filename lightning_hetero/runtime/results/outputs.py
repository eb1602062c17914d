"""Join what the steps of micro-batches returned into what one device's step would return.

Tensors of samples are joined along dim 0, numbers as `reductions` says. Other values become
`Unjoined`, which refuses to be used: the value that one device would have is unknown.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from lightning_hetero.core.errors import StepError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.results.numbers.kinds import JOINABLE, Kind, join_values
from lightning_hetero.runtime.results.numbers.reductions import Reductions

__all__ = ["Path", "Records", "StepRecord", "Unjoined", "join", "join_outputs", "records_of"]

Path = tuple[Any, ...]
"""Where a list is in a module: the attribute, then the index or key in it."""

_MANY_BYTES = 64 << 20


@dataclass(frozen=True)
class _Number:
    """A reduction over the samples of a micro-batch."""

    value: Any
    kind: Kind
    count: Any


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to all leaves, also those in dataclasses and mappings of any kind."""
    if type(tree) is dict and not tree:
        return tree

    def enter(leaf: Any) -> Any:
        if is_dataclass(leaf) and not isinstance(leaf, type | _Number):
            changed = copy(leaf)
            for each in fields(leaf):
                value = _map(function, getattr(leaf, each.name))
                object.__setattr__(changed, each.name, value)
            return changed
        if isinstance(leaf, Mapping):
            mapped: Any = copy(leaf)
            for key, value in leaf.items():
                mapped[key] = _map(function, value)
            return mapped
        return function(leaf)

    return tree_map(enter, tree)


class Unjoined:
    """Stands for a value that can't be made of the micro-batches' values; any use is refused."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values

    def __repr__(self) -> str:
        return f"Unjoined({list(self.values)})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        shown = [tuple(v.shape) if isinstance(v, Tensor) and v.ndim else v for v in self.values]
        raise StepError(
            f"A step returned, or appended to a list, {shown[:4]} in its micro-batches, and nobody "
            "can say what one device would have for the whole batch. Return or append tensors "
            "whose dim 0 are samples, or means, sums or extremes over samples as tensors."
        )

    __torch_function__ = classmethod(lambda cls, *_, **__: cls([])._refuse())
    __float__ = __int__ = __bool__ = __iter__ = __len__ = __getitem__ = __call__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __rtruediv__ = __lt__ = __le__ = __gt__ = __ge__ = __index__ = __array__ = _refuse


@dataclass
class StepRecord:
    """Output and appended items of one micro-batch's step, without its loss."""

    output: Any
    appended: dict[Path, list[Any]]
    sizes: tuple[int, ...]
    """Lengths that dim 0 of its tensors may have: number of samples, number of tokens."""

    @classmethod
    def of(
        cls,
        output: Any,
        appended: dict[Path, list[Any]],
        sizes: tuple[int, ...],
        reductions: Reductions,
    ) -> "StepRecord":
        """Make a record of what a step returned and appended, with the kinds of its numbers."""

        def mark(leaf: Any) -> Any:
            found = reductions.of(leaf) if isinstance(leaf, Tensor | float) else None
            value = leaf.detach() if isinstance(leaf, Tensor) else leaf
            if found is None or found.kind is Kind.CONSTANT:
                return value
            return _Number(value, found.kind, found.count)

        is_nothing = output is None or (isinstance(output, dict) and not output)
        if appended or not is_nothing:
            output, appended = _map(mark, (output, appended))
        return cls(output, appended, sizes)

    @property
    def is_empty(self) -> bool:
        """Whether the step has returned and appended nothing."""
        is_nothing = isinstance(self.output, Mapping) and not self.output
        return not self.appended and (self.output is None or is_nothing)

    def moved(self, device: torch.device) -> "StepRecord":
        """Return the record with copies of its tensors on a device."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)

        def move_leaf(leaf: Any) -> Any:
            if isinstance(leaf, _Number):
                return _Number(*tree_map_only(Tensor, move, (leaf.value, leaf.kind, leaf.count)))
            return move(leaf) if isinstance(leaf, Tensor) else leaf

        output, appended = _map(move_leaf, (self.output, self.appended))
        return StepRecord(output, appended, self.sizes)


Records = dict[int, list[StepRecord]]
"""Records of an iteration's steps, by pipeline, as far as this rank knows them."""


def records_of(
    own: list[StepRecord],
    plan: ParallelPlan,
    comms: Communicators,
    device: torch.device,
    *,
    shared: bool,
) -> Records:
    """Return the records of all pipelines on every rank, or this rank's own; collective if shared.

    The ranks of a tensor-parallel group have the same records: the first one sends them.
    """
    place, cpu = plan.place(comms.global_rank), torch.device("cpu")
    if not shared or comms.world_size == 1:
        return {} if place is None else {place.pipeline_index: own}
    speaks = place is not None and place.tp_rank == 0
    _warn_of_size(own)
    everyone = comms.gather_objects([item.moved(cpu) for item in own] if speaks else [])
    return {
        index: [item.moved(device) for item in everyone[pipeline.stages[-1].ranks[0]]]
        for index, pipeline in enumerate(plan.pipelines)
    }


def _warn_of_size(records: Sequence[StepRecord]) -> None:
    leaves = [leaf for item in records for leaf in tree_leaves((item.output, item.appended))]
    size = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
    if size > _MANY_BYTES:
        warnings.warn(
            f"What steps return and append takes {size / 2**20:.0f} MiB in an iteration, and goes "
            "to all ranks. Return what hooks need only, or give HeteroStrategy(share_outputs=False)"
            ": then only ranks with last stages have it.",
            stacklevel=2,
        )


def join_outputs(records: Sequence[StepRecord]) -> Any:
    """Return what the step of the whole batch would have returned; None without any."""
    return join([record.output for record in records], [record.sizes for record in records])


def join(items: Sequence[Any], sizes: Sequence[tuple[int, ...]]) -> Any:
    """Return the value of the batch from those of its micro-batches; `sizes` as in `StepRecord`."""
    if not items:
        return None
    first = items[0]
    if len(items) == 1:
        return _map(lambda leaf: leaf.value if isinstance(leaf, _Number) else leaf, first)
    if any(type(item) is not type(first) for item in items):
        return Unjoined(items)
    if isinstance(first, _Number):
        return _join_numbers(items)
    if isinstance(first, Tensor | np.ndarray):
        return _join_rows(items, sizes)
    if isinstance(first, Mapping):
        return _join_mappings(items, sizes)
    if isinstance(first, tuple | list):
        return _join_sequences(items, sizes)
    if is_dataclass(first) and not isinstance(first, type):
        joined = copy(first)
        for each in fields(first):
            values = [getattr(item, each.name) for item in items]
            object.__setattr__(joined, each.name, join(values, sizes))
        return joined
    return _join_plain(items, sizes)


def _join_numbers(items: Sequence[_Number]) -> Any:
    first = items[0]
    if first.kind not in JOINABLE or any(item.kind is not first.kind for item in items):
        return Unjoined([item.value for item in items])
    values = torch.stack([torch.as_tensor(item.value, dtype=torch.float64) for item in items])
    counts = torch.stack([torch.as_tensor(item.count).to(values) for item in items])
    total = join_values(first.kind, values, counts)
    return total.to(first.value.dtype) if isinstance(first.value, Tensor) else float(total)


def _join_rows(items: Sequence[Any], sizes: Sequence[tuple[int, ...]]) -> Any:
    """Join tensors or arrays along dim 0, if that is over samples or tokens."""
    are_tensors = isinstance(items[0], Tensor)
    if any(item.ndim == 0 or item.shape[1:] != items[0].shape[1:] for item in items):
        are_equal: Callable[[Any, Any], bool] = torch.equal if are_tensors else np.array_equal
        same = all(are_equal(item, items[0]) for item in items)
        return items[0] if same else Unjoined(items)
    lengths = [len(item) for item in items]
    # Lengths that differ are selections of samples; the same length everywhere may be anything.
    are_rows = len(set(lengths)) > 1 or any(
        _has_rows(lengths, counts) for counts in zip(*sizes, strict=True)
    )
    if not are_rows:
        return Unjoined(items)
    return torch.cat(list(items)) if are_tensors else np.concatenate(items)


def _has_rows(lengths: Sequence[int], counts: Sequence[int]) -> bool:
    """Whether there are as many rows for each sample, or for each token."""
    if not all(counts):
        return False
    pairs = zip(lengths, counts, strict=True)
    return lengths[0] % counts[0] == 0 and len({length / count for length, count in pairs}) == 1


def _join_mappings(items: Sequence[Mapping[Any, Any]], sizes: Sequence[tuple[int, ...]]) -> Any:
    first = items[0]
    if any(item.keys() != first.keys() for item in items):
        return Unjoined(items)
    joined: Any = copy(first)
    for key in first:
        joined[key] = join([item[key] for item in items], sizes)
    return joined


def _join_sequences(items: Sequence[Any], sizes: Sequence[tuple[int, ...]]) -> Any:
    first = items[0]
    by_sample = all(len(item) in size for item, size in zip(items, sizes, strict=True))
    holds_more = any(
        isinstance(part, Tensor | _Number | Mapping) for item in items for part in item
    )
    if isinstance(first, list) and (by_sample or not holds_more):
        return [part for item in items for part in item]
    if any(len(item) != len(first) for item in items):
        return Unjoined(items)
    parts = [join(part, sizes) for part in zip(*items, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)


def _join_plain(items: Sequence[Any], sizes: Sequence[tuple[int, ...]]) -> Any:
    first = items[0]
    if type(first) is int and all(item in size for item, size in zip(items, sizes, strict=True)):
        return sum(items)
    try:
        same = all(item is first or bool(item == first) for item in items)
    except (TypeError, ValueError):  # Some objects compare element by element.
        same = False
    return first if same else Unjoined(items)
