"""Collect what a step logs on last stages, and replay it on every rank.

Only last stages run the whole step, and each sees one pipeline's micro-batches. So `self.log` is
recorded there, reduced over micro-batches and pipelines (means by target tokens), and replayed with
the reduced value on all ranks: progress bar, loggers, `ModelCheckpoint(monitor=...)` and
`EarlyStopping` see the same numbers everywhere.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ALREADY_REDUCED", "LogEntry", "StepLogs"]

ALREADY_REDUCED = "already reduced"
"""Given as `sync_dist_group`: the value is the same on all ranks, and the strategy leaves it."""

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum,
    "min": torch.amin,
    "max": torch.amax,
}


@dataclass(frozen=True)
class LogEntry:
    """What identifies a logged quantity, apart from its value."""

    name: str
    options: tuple[tuple[str, Any], ...] = field(compare=False)
    """Keyword arguments of `self.log`, without name and value."""
    metric: str | None = None
    """Name of the submodule if a torchmetrics `Metric` is logged; it reduces itself."""

    @property
    def reduction(self) -> str:
        """How values of several micro-batches become one: mean, sum, min or max."""
        reduce_fx = dict(self.options).get("reduce_fx", "mean")
        name = str(getattr(reduce_fx, "__name__", reduce_fx))
        return {"amin": "min", "amax": "max"}.get(name, name)


class StepLogs:
    """The logged values of one iteration on one rank.

    Args:
        module: The LightningModule whose `log` is recorded.
        device: Where the sums are kept.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._original_log: Callable[..., None] = module.log  # type: ignore[assignment]
        self._signature = inspect.signature(self._original_log)
        self._pending: dict[LogEntry, Any] = {}
        self._values: dict[LogEntry, list[tuple[Tensor, Tensor]]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record instead of log inside this context."""
        self._pending.clear()
        self._values.clear()
        self._module.log = self._record  # type: ignore[assignment]
        try:
            yield
        finally:
            del self._module.log

    def _record(self, *args: Any, **kwargs: Any) -> None:
        options = dict(self._signature.bind(*args, **kwargs).arguments)
        name, value = options.pop("name"), options.pop("value")
        metric = None
        if isinstance(value, nn.Module):
            metric = next((key for key, item in self._module.named_modules() if item is value), "")
        self._pending[LogEntry(name, tuple(options.items()), metric)] = value

    def drop_microbatch(self) -> None:
        """Forget what a step logged that didn't run to its end."""
        self._pending.clear()

    def keep_microbatch(self, weight: Tensor) -> None:
        """Take over what one micro-batch logged, with its number of target tokens."""
        for entry, value in self._pending.items():
            number = torch.zeros(()) if entry.metric is not None else value
            number = torch.as_tensor(number, dtype=torch.float64, device=self._device).detach()
            self._values.setdefault(entry, []).append((number.reshape(()), weight))
        self._pending.clear()

    @property
    def entries(self) -> tuple[LogEntry, ...]:
        """What was logged, in order."""
        return tuple(self._values)

    def as_row(self, entries: Sequence[LogEntry]) -> Tensor:
        """Return (value, weight) of each entry as one float64 row; weight 0 for one not logged."""
        row = torch.zeros(2 * len(entries), dtype=torch.float64, device=self._device)
        for column, entry in enumerate(entries):
            pairs = self._values.get(entry)
            if pairs:
                values = torch.stack([value for value, _ in pairs])
                weights = torch.stack([weight for _, weight in pairs])
                row[2 * column] = _reduce(entry.reduction, values, weights)
                row[2 * column + 1] = weights.sum().clamp(min=torch.finfo(torch.float32).tiny)
        return row

    def replay(self, entries: Sequence[LogEntry], rows: Tensor, batch_size: int) -> None:
        """Log the value reduced over all ranks' rows, with the same arguments on every rank.

        Args:
            entries: The entries of all ranks, in one order.
            rows: (num_ranks, 2 * num_entries), what `as_row` returned on each.
            batch_size: Weight of this iteration in an epoch's mean, unless the user gave one.
        """
        for column, entry in enumerate(entries):
            options = dict(entry.options)
            if entry.metric is not None:
                value: Any = self._module.get_submodule(entry.metric)
            else:
                options.update(sync_dist=True, sync_dist_group=ALREADY_REDUCED)
                values, weights = rows[:, 2 * column], rows[:, 2 * column + 1]
                logged = weights > 0
                value = _reduce(entry.reduction, values[logged], weights[logged]).float()
            options["batch_size"] = max(batch_size, 1)
            self._original_log(entry.name, value, **options)


def _reduce(reduction: str, values: Tensor, weights: Tensor) -> Tensor:
    if reduction in _REDUCTIONS:
        return _REDUCTIONS[reduction](values)
    total = weights.sum()
    # A weight of 0 may belong to a value that is no number, such as the mean of no targets.
    weighted = torch.where(weights > 0, values * weights, torch.zeros_like(values)).sum()
    return torch.where(total > 0, weighted / total, values.mean())
