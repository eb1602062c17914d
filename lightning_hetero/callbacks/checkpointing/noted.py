"""What is noted at a step's end, and what makes a checkpoint of it once a rank is lost.

An iteration changes little of what a checkpoint holds besides slices: that is copied at each step's
end, and the rest is read when it is needed.
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
from lightning_hetero.checkpoint import CheckpointContent

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
    """Yield where masters, averages and buffers are registered."""
    for root in (trainer.lightning_module, *(model.module for model in average_models(trainer))):
        for module in root.modules():
            for registered in (module._parameters, module._buffers):
                yield from (
                    (registered, name) for name, item in registered.items() if item is not None
                )


def trackers_of(loop: Any) -> Iterator[Any]:
    """Yield the counters of a loop and of those inside of it, also those that others consist of."""
    for item in vars(loop).values():
        if isinstance(item, _BaseProgress):
            yield item
        if isinstance(item, _BaseProgress | _Loop):
            yield from trackers_of(item)


def dump_step(trainer: pl.Trainer) -> dict[str, Any]:
    """Return what an iteration, or the end of an epoch, changes of a checkpoint's metadata."""
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
    """Return a checkpoint's metadata as they were when `changing` was noted."""
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
    """Return a state whose tensors take no memory of the device."""
    slices = tuple(
        replace(
            item,
            weight=item.weight.cpu(),
            state={key: tensor.cpu() for key, tensor in item.state.items()},
            whole_state={key: tensor.cpu() for key, tensor in item.whole_state.items()},
        )
        for item in content.slices
    )
    return replace(content, slices=slices)
