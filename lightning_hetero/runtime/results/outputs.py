"""Join what the steps of micro-batches returned, or appended to the module's lists.

Tensors are concatenated along dim 0; numbers without dims are averaged as the loss is. Lists are
concatenated; dicts and tuples are joined item by item. If values are neither equal nor can be
joined, the result is a list with the value of each micro-batch. Example: two micro-batches of 4 and
2 rows that return `{"logits": (4, 10), "name": "a"}` and `{"logits": (2, 10), "name": "a"}` give
`{"logits": (6, 10), "name": "a"}`.

Steps run to their end only on last stages, once per micro-batch. So items that they append to the
module's lists are removed there, joined, and appended on every rank, one item per batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.runtime.ranks.communicators import Communicators

Path = tuple[Any, ...]
"""Where a list is in a module: the attribute, then the index or key in it."""


@dataclass
class StepRecord:
    """Output and appended items of one micro-batch's step, without its loss."""

    output: Any
    appended: dict[Path, list[Any]]
    weight: Any = 1.0
    """Weight of its numbers in a mean: a number, or a scalar tensor."""

    @property
    def is_empty(self) -> bool:
        """Whether the step has returned and appended nothing."""
        is_nothing = isinstance(self.output, Mapping) and not self.output
        return not self.appended and (self.output is None or is_nothing)

    def detached(self) -> "StepRecord":
        """Return the record with its tensors detached from autograd."""
        if self.is_empty:
            return self
        output, appended = apply_to_collection((self.output, self.appended), Tensor, Tensor.detach)
        return StepRecord(output, appended, self.weight)

    def moved(self, device: torch.device) -> "StepRecord":
        """Return the record with copies of its tensors on a device."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)

        output, appended = apply_to_collection((self.output, self.appended), Tensor, move)
        return StepRecord(output, appended, float(self.weight))


Records = dict[int, list[StepRecord]]
"""Records of an iteration's steps, by pipeline; those that this rank has."""


def records_of(
    own: list[StepRecord],
    plan: ParallelPlan,
    comms: Communicators,
    device: torch.device,
    *,
    shared: bool,
) -> Records:
    """Return the records of all pipelines on every rank if `shared`, else this rank's own.

    Ranks of a tensor-parallel group have the same records: the first one sends them.
    """
    place, cpu = plan.place(comms.global_rank), torch.device("cpu")
    if not shared or comms.world_size == 1:
        return {} if place is None else {place.pipeline_index: own}
    reports = place is not None and place.tp_rank == 0
    everyone = comms.gather_objects([item.moved(cpu) for item in own] if reports else [])
    return {
        index: [item.moved(device) for item in everyone[pipeline.stages[-1].ranks[0]]]
        for index, pipeline in enumerate(plan.pipelines)
    }


def join_outputs(records: Sequence[StepRecord]) -> Any:
    """Return what the step of the whole batch would have returned; None if there is no output."""
    outputs = [item.output for item in records]
    return _joined(outputs, [item.weight for item in records]) if outputs else None


def _joined(items: Sequence[Any], weights: Sequence[Any]) -> Any:
    if len(items) == 1:
        return items[0]
    trees = [tree_flatten(item, is_leaf=lambda part: isinstance(part, list)) for item in items]
    spec = trees[0][1]
    if any(other != spec for _, other in trees):
        return list(items)
    columns = zip(*(leaves for leaves, _ in trees), strict=True)
    return tree_unflatten([_joined_leaves(column, weights) for column in columns], spec)


def _joined_leaves(items: Sequence[Any], weights: Sequence[Any]) -> Any:
    first = items[0]
    if any(type(item) is not type(first) for item in items):
        return list(items)
    if isinstance(first, list):
        return [part for item in items for part in item]
    if isinstance(first, Tensor | np.ndarray) and first.ndim:
        if any(item.shape[1:] != first.shape[1:] for item in items):
            return list(items)
        return torch.cat(list(items)) if isinstance(first, Tensor) else np.concatenate(items)
    if isinstance(first, Tensor | np.generic | float) or type(first) is int:
        return _averaged(items, weights)
    return first if all(item is first or item == first for item in items) else list(items)


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


class AppendedLists:
    """Takes out the items that steps append to lists of the module.

    The lists are attributes, or in lists or dicts that are attributes. Made before an iteration's
    steps; after each of them `take` is called.
    """

    def __init__(self, module: nn.Module) -> None:
        self._attributes = vars(module)
        self._lengths = {path: len(items) for path, items in self._lists()}

    def take(self) -> dict[Path, list[Any]]:
        """Remove and return the items that the last step has appended."""
        taken: dict[Path, list[Any]] = {}
        for path, items in self._lists():
            before = self._lengths.get(path, 0)
            if len(items) > before:
                taken[path] = items[before:]
                del items[before:]
            self._lengths[path] = len(items)
        return taken

    def _lists(self) -> Iterator[tuple[Path, list[Any]]]:
        for name, value in self._attributes.items():
            if type(value) is list:
                yield (name,), value
                if value and type(value[0]) is list:
                    inner = enumerate(value)
                    yield from (((name, at), item) for at, item in inner if type(item) is list)
            elif name[0] != "_" and isinstance(value, dict):
                for key, item in value.items():
                    if type(item) is list:
                        yield (name, key), item


def extend_lists(module: nn.Module, records: Sequence[StepRecord]) -> None:
    """Append what the step of the whole batch would have appended to the module's lists."""
    for path in dict.fromkeys(path for record in records for path in record.appended):
        columns = [record.appended.get(path, []) for record in records]
        items: Any = getattr(module, path[0])
        if len(path) > 1:
            items = items.setdefault(path[1], []) if isinstance(items, dict) else items[path[1]]
        if len({len(column) for column in columns}) > 1:
            items += [item for column in columns for item in column]
        else:
            weights = [record.weight for record in records]
            items += [_joined(parts, weights) for parts in zip(*columns, strict=True)]
