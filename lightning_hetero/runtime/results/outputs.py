"""Join what the steps of micro-batches returned, or appended to the module's lists.

Tensors are concatenated along dim 0; numbers without dims are averaged as the loss is. Lists are
concatenated; mappings, tuples and dataclasses are joined item by item. Other values must be equal.
What can't be joined becomes `Unjoined`, which refuses to be used.

Steps run to their end on last stages only, once per micro-batch. So the items that they append to
lists of the module are taken out, joined, and appended on every rank, one item per batch.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_hetero.core.errors import StepError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.runtime.ranks.communicators import Communicators

__all__ = [
    "AppendedLists",
    "Records",
    "StepRecord",
    "Unjoined",
    "extend_lists",
    "join_outputs",
    "records_of",
]

Path = tuple[Any, ...]
"""Where a list is in a module: the attribute, then the index or key in it."""
_MANY_BYTES = 64 << 20


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
            f"A step returned, or appended to a list, {shown[:4]} in its micro-batches, which "
            "can't be put together for the whole batch. Return or append tensors that agree in all "
            "dims but the first, or numbers."
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
    weight: Any = 1.0
    """Of its numbers: a number, or a scalar tensor."""

    @property
    def is_empty(self) -> bool:
        """Whether the step has returned and appended nothing."""
        is_nothing = isinstance(self.output, Mapping) and not self.output
        return not self.appended and (self.output is None or is_nothing)

    def detached(self) -> "StepRecord":
        """Return the record without what autograd keeps for its tensors."""
        if self.is_empty:
            return self
        output, appended = _map_tensors(Tensor.detach, (self.output, self.appended))
        return StepRecord(output, appended, self.weight)

    def moved(self, device: torch.device) -> "StepRecord":
        """Return the record with copies of its tensors on a device."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)

        output, appended = _map_tensors(move, (self.output, self.appended))
        return StepRecord(output, appended, float(self.weight))


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
    outputs = [item.output for item in records]
    return _joined(outputs, [item.weight for item in records]) if outputs else None


def _joined(items: Sequence[Any], weights: Sequence[Any]) -> Any:
    first = items[0]
    if len(items) == 1:
        return first
    if any(type(item) is not type(first) for item in items):
        return Unjoined(items)
    if isinstance(first, Tensor | np.ndarray) and first.ndim:
        return _concatenated(items)
    if isinstance(first, Tensor | np.generic | float) or type(first) is int:
        return _averaged(items, weights)
    if isinstance(first, list):
        return [part for item in items for part in item]
    if isinstance(first, Mapping | tuple) or (is_dataclass(first) and not isinstance(first, type)):
        return _joined_inside(items, weights)
    return first if all(item is first or item == first for item in items) else Unjoined(items)


def _joined_inside(items: Sequence[Any], weights: Sequence[Any]) -> Any:
    """Join mappings, tuples or dataclasses item by item."""
    first = items[0]
    if isinstance(first, Mapping):
        made: Any = copy(first)
        if any(item.keys() != first.keys() for item in items):
            return Unjoined(items)
        for key in first:
            made[key] = _joined([item[key] for item in items], weights)
        return made
    if isinstance(first, tuple):
        if any(len(item) != len(first) for item in items):
            return Unjoined(items)
        parts = [_joined(part, weights) for part in zip(*items, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    made = copy(first)
    for each in fields(first):
        values = [getattr(item, each.name) for item in items]
        object.__setattr__(made, each.name, _joined(values, weights))
    return made


def _concatenated(items: Sequence[Any]) -> Any:
    if any(item.shape[1:] != items[0].shape[1:] for item in items):
        return Unjoined(items)
    return torch.cat(list(items)) if isinstance(items[0], Tensor) else np.concatenate(items)


def _averaged(items: Sequence[Any], weights: Sequence[Any]) -> Any:
    shares = torch.tensor([float(item) for item in weights], dtype=torch.float64)
    shares = shares if shares.sum() > 0 else torch.ones_like(shares)
    values = torch.tensor([float(item) for item in items], dtype=torch.float64)
    mean = torch.where(shares > 0, values * shares, 0.0).sum() / shares.sum()
    if isinstance(items[0], Tensor):
        return mean.to(
            items[0].device, torch.promote_types(items[0].dtype, torch.get_default_dtype())
        )
    return items[0] if all(item == items[0] for item in items) else float(mean)


def _map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply a function to all tensors, also those in dataclasses and mappings of any kind."""

    def enter(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if is_dataclass(leaf) and not isinstance(leaf, type):
            changed = copy(leaf)
            for each in fields(leaf):
                value = _map_tensors(function, getattr(leaf, each.name))
                object.__setattr__(changed, each.name, value)
            return changed
        if isinstance(leaf, Mapping):
            mapped: Any = copy(leaf)
            for key, value in leaf.items():
                mapped[key] = _map_tensors(function, value)
            return mapped
        return leaf

    return tree_map(enter, tree)


class AppendedLists:
    """Items that steps append to lists of the module: attributes, or lists in them or in dicts.

    Called around each step: `begin`, then `take`.

    Args:
        module: The LightningModule.
    """

    def __init__(self, module: nn.Module) -> None:
        self._attributes = vars(module)
        self._lengths: dict[Path, int] = {}

    def begin(self) -> None:
        """Note the lists' lengths before a step."""
        self._lengths = {path: len(items) for path, items in self._lists()}

    def take(self) -> dict[Path, list[Any]]:
        """Remove and return the items appended since `begin`."""
        taken: dict[Path, list[Any]] = {}
        for path, items in self._lists():
            before = self._lengths.get(path, 0)
            if len(items) > before:
                taken[path] = items[before:]
                del items[before:]
        return taken

    def _lists(self) -> Iterator[tuple[Path, list[Any]]]:
        for name, value in self._attributes.items():
            if type(value) is list:
                yield (name,), value
                if value and type(value[0]) is list:
                    inner = enumerate(value)
                    yield from (((name, at), item) for at, item in inner if type(item) is list)
            elif isinstance(value, dict) and name[0] != "_":
                for key, item in value.items():
                    if type(item) is list:
                        yield (name, key), item


def extend_lists(module: nn.Module, records: Sequence[StepRecord]) -> None:
    """Append what the step of the whole batch would have appended to the module's lists."""
    for path in dict.fromkeys(path for record in records for path in record.appended):
        columns = [record.appended.get(path, []) for record in records]
        items = _list_at(module, path)
        if len({len(column) for column in columns}) > 1:
            items += [item for column in columns for item in column]
        else:
            weights = [record.weight for record in records]
            items += [_joined(parts, weights) for parts in zip(*columns, strict=True)]


def _list_at(module: nn.Module, path: Path) -> list[Any]:
    found: Any = getattr(module, path[0])
    if len(path) > 1:
        found = found.setdefault(path[1], []) if isinstance(found, dict) else found[path[1]]
    items: list[Any] = found
    return items
