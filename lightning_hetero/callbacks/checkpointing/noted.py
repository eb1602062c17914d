"""Note the state at a step's end, and make a checkpoint's metadata of it once a rank is lost.

Besides slices, an iteration changes little of what a checkpoint holds: that little is copied at
each step's end, and the rest is read when it is needed. What the module has gathered over steps in
metrics, lists and logged means stays in the process; what an interrupted iteration or validation
has added is taken out again, since it will be run again.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor
from torchmetrics import Metric

from lightning_hetero.callbacks.checkpointing.owned import average_models
from lightning_hetero.callbacks.checkpointing.training_state import (
    dump_changing,
    has_finished_epoch,
)
from lightning_hetero.checkpoint import CheckpointContent, SliceContent
from lightning_hetero.runtime.results.outputs import AppendedLists

__all__ = [
    "LOADERS",
    "Gathered",
    "complete",
    "copied",
    "dump_step",
    "metrics_of",
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


_State = dict[str, Any]


class Gathered:
    """A copy of a module's metrics, lists and logged means, made when this is.

    ::

        gathered = Gathered(trainer, list(metrics_of(trainer.lightning_module)))
        ...  # an iteration or a validation that is cut short
        gathered.put_back()

    Args:
        trainer: The Trainer that fits.
        metrics: The module's metrics.
    """

    def __init__(self, trainer: pl.Trainer, metrics: Sequence[Metric]) -> None:
        self.results = trainer.fit_loop.epoch_loop._results
        """Lightning's accumulated means of the epoch."""
        self._keys = tuple(self.results)
        self._states = [(item, _state_of(item)) for item in (*metrics, *self.results.values())]
        self._lists = AppendedLists(trainer.lightning_module)
        self._lists.begin()

    def put_back(self) -> None:
        """Restore all of it."""
        for key in set(self.results).difference(self._keys):
            del self.results[key]
        for metric, state in self._states:
            _put_back(metric, state)
        self._lists.take()


def metrics_of(module: pl.LightningModule) -> Iterator[Metric]:
    """Yield the metrics of torchmetrics that a module holds."""
    yield from (item for item in module.modules() if isinstance(item, Metric))


def _state_of(metric: Metric) -> _State:
    state: _State = {"_update_count": metric._update_count}
    if isinstance(metric, _ResultMetric):
        # It replaces its tensors and changes none in place, so they needn't be copied.
        state |= {name: getattr(metric, name) for name in metric._defaults}
        return {**state, "has_reset": metric.has_reset, "_forward_cache": metric._forward_cache}
    for name in metric._defaults:
        value = getattr(metric, name)
        state[name] = list(value) if isinstance(value, list) else value.clone()
    return state


def _put_back(metric: Metric, state: _State) -> None:
    for name, value in state.items():
        setattr(metric, name, value)
    metric._computed = None
