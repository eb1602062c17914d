"""What a module has gathered over steps in metrics, lists and logged means, besides checkpoints.

It stays in the process where a rank is lost. What an iteration or a validation that was cut short
has added is taken out again, since either is done again.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torchmetrics import Metric

from lightning_hetero.runtime.results.appended_lists import AppendedLists

__all__ = ["Gathered", "metrics_of"]

_State = dict[str, Any]


class Gathered:
    """A module's metrics and lists and the means that it logs, as they are when this is made.

    ::

        gathered = Gathered(trainer, list(metrics_of(trainer.lightning_module)))
        ...  # an iteration or a validation that is cut short
        gathered.put_back()

    Args:
        trainer: Who fits.
        metrics: The module's.
    """

    def __init__(self, trainer: pl.Trainer, metrics: Sequence[Metric]) -> None:
        self.results = trainer.fit_loop.epoch_loop._results
        """The means of the epoch that Lightning has gathered."""
        self._keys = tuple(self.results)
        self._states = [(item, _state_of(item)) for item in (*metrics, *self.results.values())]
        self._lists = AppendedLists(trainer.lightning_module)
        self._lists.begin()

    def put_back(self) -> None:
        """Let all be as it was."""
        for key in set(self.results).difference(self._keys):
            del self.results[key]
        for metric, state in self._states:
            _put_back(metric, state)
        self._lists.take(after_layers=True)


def metrics_of(module: pl.LightningModule) -> Iterator[Metric]:
    """Yield the metrics of torchmetrics that a module holds."""
    yield from (item for item in module.modules() if isinstance(item, Metric))


def _state_of(metric: Metric) -> _State:
    state: _State = {"_update_count": metric._update_count}
    if isinstance(metric, _ResultMetric):
        # It puts new tensors in their places, and changes none.
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
