"""Let torchmetrics' metrics of the module have what one device's have, on every rank.

Last stages update them, each with its pipeline's micro-batches. When a metric computes, the states
of those ranks are put together, whatever they are; the others have nothing to give. Its value of a
step is that of all micro-batches of the iteration.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.ranks.communicators import Communicators

__all__ = ["StepMetrics"]

_Call = tuple[tuple[Any, ...], dict[str, Any]]


class StepMetrics:
    """The metrics of one module.

    Args:
        module: The LightningModule that holds them.
        comms: The communicators.
        speaks: Whether this rank's states count: the first of a tensor-parallel group does.
    """

    def __init__(self, module: nn.Module, comms: Communicators, speaks: Callable[[], bool]) -> None:
        self.comms = comms
        self.speaks = speaks
        self.in_step = False
        """Whether a step runs, in which ranks can't wait for each other."""
        self._metrics = [item for item in module.modules() if isinstance(item, Metric)]
        self._calls: dict[int, list[_Call]] = {}
        self._hooks = [
            metric.register_forward_pre_hook(self._see, with_kwargs=True)
            for metric in self._metrics
        ]
        for metric in self._metrics:
            if "_sync_dist" not in vars(metric) and type(metric)._sync_dist is Metric._sync_dist:
                metric._sync_dist = _Sync(metric, self)  # type: ignore[method-assign]

    def __deepcopy__(self, memo: dict[int, Any]) -> "StepMetrics":
        """Return itself: copies of metrics are synchronised by the same."""
        return self

    def remove(self) -> None:
        """Give the metrics their own methods back."""
        for hook in self._hooks:
            hook.remove()
        for metric in self._metrics:
            vars(metric).pop("_sync_dist", None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Remember with what metrics are called inside this context."""
        self._calls.clear()
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False
            for metric in self._metrics:
                # Otherwise ranks that updated nothing would give what they computed before.
                metric._computed = None

    def _see(self, metric: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.in_step:
            self._calls.setdefault(id(metric), []).append((args, kwargs))

    def set_step_value(self, metric: Metric) -> None:
        """Let the metric's last value be that of the whole iteration; collective."""
        alone = metric.clone()
        alone.reset()
        for args, kwargs in self._calls.get(id(metric), ()):
            alone.update(*args, **kwargs)
        metric._forward_cache = alone.compute()


class _Sync:
    """Stands in for a metric's `_sync_dist`; a copy of the metric gets one of its own."""

    def __init__(self, metric: Metric, metrics: StepMetrics) -> None:
        self._metric = metric
        self._metrics = metrics

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Sync":
        return _Sync(memo.get(id(self._metric), self._metric), self._metrics)

    def __call__(self, *_: Any, **__: Any) -> None:
        metric, metrics = self._metric, self._metrics
        if metrics.in_step:
            raise StepError(
                f"{type(metric).__name__} computes over all ranks inside a step, which only last "
                "stages run to its end. Log the metric itself, or compute it in a hook."
            )
        own: dict[str, Any] | None = None
        if metrics.speaks() and metric.update_called:
            own = {name: getattr(metric, name) for name in metric._reductions}
            own = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), own)
        device = metric.device
        found = [item for item in metrics.comms.gather_objects(own) if item is not None]
        for name, reduction in metric._reductions.items():
            values = tree_map_only(
                Tensor, lambda tensor: tensor.to(device), [item[name] for item in found]
            )
            if values:
                setattr(metric, name, _reduced(values, reduction))


def _reduced(values: list[Any], reduction: Any) -> Any:
    """Return one state out of those of several ranks, as torchmetrics has it then."""
    if isinstance(values[0], list) or reduction is dim_zero_cat:
        items = [part for item in values for part in (item if isinstance(item, list) else [item])]
        if reduction is None or not items:
            return items
        return reduction(items)
    if len(values) == 1:
        return values[0]
    stacked = torch.stack(values)
    return stacked if reduction is None else reduction(stacked)
