"""Note the state at a step's end, and make a checkpoint's metadata of it once a rank is lost.

Besides slices, an iteration changes little of what a checkpoint holds: that little is copied at
each step's end, and the rest is read when it is needed.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from torch import Tensor

from lightning_hetero.callbacks.checkpointing.owned import average_models
from lightning_hetero.callbacks.checkpointing.training_state import (
    dump_changing,
    has_finished_epoch,
)
from lightning_hetero.checkpoint import CheckpointContent, SliceContent

__all__ = [
    "LOADERS",
    "complete",
    "copied",
    "dump_step",
    "on_host",
    "places_of",
    "trackers_of",
]

LOADERS, _GROUPS = "combined_loader", "groups"
_PLAIN = frozenset({int, float, str, bytes, bool, type(None)})


def places_of(trainer: pl.Trainer) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (dict, key) under which each master, average and buffer is registered."""
    for root in (trainer.lightning_module, *(model.module for model in average_models(trainer))):
        for module in root.modules():
            for registered in (module._parameters, module._buffers):
                yield from (
                    (registered, name) for name, item in registered.items() if item is not None
                )


def trackers_of(loop: Any) -> Iterator[Any]:
    """Yield the counters of a loop and of the loops in it, and the counters inside counters."""
    for item in vars(loop).values():
        if isinstance(item, _BaseProgress):
            yield item
        if isinstance(item, _BaseProgress | _Loop):
            yield from trackers_of(item)


def dump_step(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the part of a checkpoint's metadata that an iteration or an epoch's end changes."""
    loader = trainer.fit_loop._combined_loader
    return {
        **dump_changing(trainer),
        LOADERS: [] if loader is None else loader._state_dicts(),
        _GROUPS: [
            [{key: group[key] for key in group if key != "params"} for group in item.param_groups]
            for item in trainer.optimizers
        ],
    }


def complete(
    metadata: dict[str, Any], changing: dict[str, Any], trainer: pl.Trainer
) -> dict[str, Any]:
    """Return `metadata` as it was when `changing` was noted (by `dump_step`)."""
    was = dict(changing)
    loaders, groups = was.pop(LOADERS), was.pop(_GROUPS)
    state = metadata["loops"]["fit_loop"]["state_dict"]
    state.pop(LOADERS, None)
    if loaders and not has_finished_epoch(trainer):  # See `training_state`.
        state[LOADERS] = loaders
    for item, old in zip(metadata["optimizer_states"], groups, strict=True):
        for group, values in zip(item["param_groups"], old, strict=True):
            group.update(values)
    return {**metadata, **was}


def copied(value: Any) -> Any:
    """Return a copy that later changes in place don't reach."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {key: copied(item) for key, item in value.items()}
    if kind in (list, tuple):
        return kind(map(copied, value))
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def on_host(content: CheckpointContent) -> CheckpointContent:
    """Return the same content with its tensors on the host."""
    return replace(content, slices=tuple(map(_slice_on_host, content.slices)))


def _slice_on_host(item: SliceContent) -> SliceContent:
    if all(t.is_cpu for t in (item.weight, *item.state.values(), *item.whole_state.values())):
        return item
    return replace(
        item,
        weight=item.weight.cpu(),
        state={key: tensor.cpu() for key, tensor in item.state.items()},
        whole_state={key: tensor.cpu() for key, tensor in item.whole_state.items()},
    )
