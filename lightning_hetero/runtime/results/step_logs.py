"""Collect what a step logs on last stages, and replay it on every rank.

Only last stages run the whole step, and each sees one pipeline's micro-batches. So `self.log` is
recorded there, combined over micro-batches and pipelines by its `reduce_fx`, and replayed with the
combined value on all ranks: progress bar, loggers, `ModelCheckpoint(monitor=...)` and
`EarlyStopping` see the same numbers everywhere. Means are weighted by the `batch_size` that the
step gives, else as the loss is.
"""

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from torch import Tensor, nn

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.results.metrics import StepMetrics
from lightning_hetero.runtime.unknown import check_known

ALREADY_REDUCED = "already reduced"
"""Given as `sync_dist_group`: the value is the same on all ranks, and the strategy leaves it."""

_NUM_COLUMNS = 3
_LIGHT = 1e-30
"""Weight of a logged mean of no targets: it counts only where no other rank has any."""
_NAMES = {"avg": "mean"} | {name: name for name in ("mean", "sum", "min", "max")}
_NEUTRAL = {"max": -math.inf, "min": math.inf}


@dataclass(frozen=True)
class LogEntry:
    """The identity of a logged quantity, apart from its value."""

    name: str
    options: tuple[tuple[str, Any], ...] = field(default=(), compare=False)
    """Keyword arguments of `self.log`, without name and value."""
    metric: str | None = None
    """Name of the submodule if a torchmetrics `Metric` is logged; it reduces itself."""
    reduction: str = "mean"
    """How values of several micro-batches become one: mean, sum, min or max."""


class StepLogs:
    """The logged values of one iteration on one rank."""

    def __init__(
        self, module: nn.Module, device: torch.device, metrics: StepMetrics | None = None
    ) -> None:
        self._module = module
        self._metrics = metrics
        self._device = device
        self._log = partial(type(module).log, module)  # type: ignore[attr-defined]
        self._signature = inspect.signature(self._log)
        self._pending: dict[LogEntry, tuple[Any, int]] = {}
        """Value and batch size of the present micro-batch; dropped if its step doesn't end."""
        self._values: dict[LogEntry, list[tuple[Tensor, Tensor, int]]] = {}
        """Value, weight and batch size of each micro-batch."""

    @contextmanager
    def recording(self, *, is_cut: bool = True, is_last: bool = True) -> Iterator[None]:
        """Record instead of log inside this context; for the arguments see `StepMetrics`."""
        self._pending.clear()
        self._values.clear()
        # Not by `setattr`, which looks among parameters, buffers and modules first.
        own = vars(self._module)
        own.update(log=self._record, all_gather=_refuse_gathering)
        try:
            if self._metrics is None or not self._metrics.are_any:
                yield
            else:
                with self._metrics.recording(is_cut=is_cut, is_last=is_last):
                    yield
        finally:
            del own["all_gather"], own["log"]

    def remove(self) -> None:
        """Restore the methods of the module's metrics."""
        if self._metrics is not None:
            self._metrics.remove()

    def _record(self, *args: Any, **kwargs: Any) -> None:
        options: dict[str, Any] = {}
        for key, value in self._signature.bind(*args, **kwargs).arguments.items():
            kind = self._signature.parameters[key].kind
            options.update(value if kind is inspect.Parameter.VAR_KEYWORD else {key: value})
        name, value = options.pop("name"), options.pop("value")
        # Varies from batch to batch, so it is a number of the row and not part of the entry.
        batch_size = options.pop("batch_size", None) or 0
        metric = None
        if isinstance(value, nn.Module):
            metric = next((key for key, item in self._module.named_modules() if item is value), "")
        reduce_fx = options.get("reduce_fx", "mean")
        reduction = _NAMES.get(str(getattr(reduce_fx, "__name__", reduce_fx)).lower())
        if reduction is None:
            raise StepError(
                f"self.log({name!r}) has reduce_fx={reduce_fx!r}. Lightning knows mean, sum, min "
                "and max: log a torchmetrics.Metric for any other reduction."
            )
        entry = LogEntry(name, tuple(options.items()), metric, reduction)
        self._pending[entry] = value, int(batch_size)

    def drop_microbatch(self) -> None:
        """Discard the logs of a step that didn't run to its end."""
        self._pending.clear()

    def keep_microbatch(self, weight: Tensor, *, summed: object = None) -> None:
        """Take over what one micro-batch logged.

        Args:
            weight: That of its means, if the step gives no batch size.
            summed: The step's loss, if it is a sum: logged as it is, it stays one.
        """
        for entry, (value, batch_size) in self._pending.items():
            is_metric = entry.metric is not None
            told = f"What is logged as {entry.name!r} needs"
            check_known(getattr(value, "metric_state", value) if is_metric else value, told)
            if value is summed is not None and entry.reduction == "mean":
                entry = LogEntry(entry.name, entry.options, None, "sum")
            number = self._metrics.is_called(value) if is_metric and self._metrics else value
            number = torch.as_tensor(number, dtype=torch.float64, device=self._device).detach()
            own = weight.new_tensor(float(batch_size)) if batch_size else weight
            self._values.setdefault(entry, []).append((number.reshape(()), own, batch_size))
        self._pending.clear()

    @property
    def entries(self) -> tuple[LogEntry, ...]:
        """The entries logged so far, in order."""
        return tuple(self._values)

    def as_row(self, entries: Sequence[LogEntry]) -> Tensor:
        """Return (value, weight, batch size) of entries, float64; weight 0 if it wasn't logged."""
        row = torch.zeros(_NUM_COLUMNS * len(entries), dtype=torch.float64, device=self._device)
        for index, entry in enumerate(entries):
            if entry in self._values:
                values, weights, sizes = zip(*self._values[entry], strict=True)
                heavy = torch.stack(weights).clamp(min=_LIGHT)
                first = _NUM_COLUMNS * index
                row[first] = _combined(entry.reduction, torch.stack(values), heavy)
                row[first + 1], row[first + 2] = heavy.sum(), sum(sizes)
        return row

    def replay(self, entries: Sequence[LogEntry], rows: Tensor, batch_size: int) -> None:
        """Log the value combined over all ranks' rows, with the same arguments on every rank.

        Args:
            entries: The entries of all ranks, in one order.
            rows: (num_ranks, columns * num_entries), what `as_row` returned on each.
            batch_size: Weight of this iteration in an epoch's mean, unless the user gave one.
        """
        for index, entry in enumerate(entries):
            values, weights, sizes = rows[:, _NUM_COLUMNS * index :][:, :_NUM_COLUMNS].unbind(1)
            options = dict(entry.options)
            options["batch_size"] = _batch_size_of(sizes.sum(), max(batch_size, 1))
            value: Any = _combined(entry.reduction, values, weights).float()
            if entry.metric is not None:
                is_called = bool(value)
                value = self._module.get_submodule(entry.metric)
                if self._metrics is not None and self._is_of_step(options):
                    # A metric that is only updated has no value for a step, as in Lightning.
                    value._forward_cache = None
                    if is_called:
                        self._metrics.set_step_value(value)
            else:
                options.update(sync_dist=True, sync_dist_group=ALREADY_REDUCED)
            self._log(entry.name, value, **options)

    def _is_of_step(self, options: dict[str, Any]) -> bool:
        """Whether a metric's value for the step alone is logged."""
        if options.get("on_step") is not None:
            return bool(options["on_step"])
        hook = str(getattr(self._module, "_current_fx_name", None))
        known = _FxValidator.functions.get(hook)
        return bool(known) and _FxValidator.get_default_logging_levels(hook, None, None)[0]


def _refuse_gathering(*_: Any, **__: Any) -> None:
    raise StepError(
        "A step calls self.all_gather, but only last stages run steps to their end, so the others "
        "would never answer. Log or return what shall be gathered: logs are those of the whole "
        "batch, and hooks get what all ranks' steps have returned."
    )


def _combined(reduction: str, values: Tensor, weights: Tensor) -> Tensor:
    """Return one number of several; those of weight 0 aren't there."""
    known = values.masked_fill(weights <= 0, _NEUTRAL.get(reduction, 0.0))
    if reduction != "mean":
        total: Tensor = getattr(torch, {"max": "amax", "min": "amin"}.get(reduction, reduction))(
            known
        )
        return total
    # A mean of no targets may be NaN.
    heavy = weights > 2 * _LIGHT * len(weights)
    weights, light = weights * heavy, (weights > 0).double()
    mean = torch.where(heavy, known * weights, 0.0).sum() / weights.sum()
    return torch.where(heavy.any(), mean, known.sum() / light.sum())


def _batch_size_of(given: Tensor, otherwise: int) -> Any:
    """Return the batch size that steps gave, else `otherwise`, without waiting for a device."""
    if given.device.type == "cpu":
        return int(given) or otherwise
    return torch.where(given > 0, given, otherwise).long()
