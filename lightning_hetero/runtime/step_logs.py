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

from lightning_hetero.runtime.unknown import check_known

__all__ = ["ALREADY_REDUCED", "LogEntry", "StepLogs"]

ALREADY_REDUCED = "already reduced"
"""Given as `sync_dist_group`: the value is the same on all ranks, and the strategy leaves it."""

_NUM_COLUMNS = 3

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
        self._pending: dict[LogEntry, tuple[Any, int]] = {}
        self._values: dict[LogEntry, list[tuple[Tensor, Tensor, int]]] = {}

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
        self._pending[LogEntry(name, tuple(options.items()), metric)] = value, int(batch_size)

    def drop_microbatch(self) -> None:
        """Forget what a step logged that didn't run to its end."""
        self._pending.clear()

    def keep_microbatch(self, weight: Tensor) -> None:
        """Take over what one micro-batch logged, with its number of target tokens."""
        for entry, (value, batch_size) in self._pending.items():
            seen = getattr(value, "metric_state", value)
            check_known(seen, f"What is logged as {entry.name!r} needs")
            number = torch.zeros(()) if entry.metric is not None else value
            number = torch.as_tensor(number, dtype=torch.float64, device=self._device).detach()
            values = self._values.setdefault(entry, [])
            values.append((number.reshape(()), weight, batch_size))
        self._pending.clear()

    @property
    def entries(self) -> tuple[LogEntry, ...]:
        """What was logged, in order."""
        return tuple(self._values)

    def as_row(self, entries: Sequence[LogEntry]) -> Tensor:
        """Return (value, weight, batch size) of each entry as one float64 row.

        The weight is 0 for an entry not logged, the batch size 0 for one logged without it.
        """
        row = torch.zeros(_NUM_COLUMNS * len(entries), dtype=torch.float64, device=self._device)
        for index, entry in enumerate(entries):
            logged = self._values.get(entry)
            if logged:
                values = torch.stack([value for value, _, _ in logged])
                weights = torch.stack([weight for _, weight, _ in logged])
                first = _NUM_COLUMNS * index
                row[first] = _reduce(entry.reduction, values, weights)
                row[first + 1] = weights.sum().clamp(min=torch.finfo(torch.float32).tiny)
                row[first + 2] = sum(batch_size for _, _, batch_size in logged)
        return row

    def replay(self, entries: Sequence[LogEntry], rows: Tensor, batch_size: int) -> None:
        """Log the value reduced over all ranks' rows, with the same arguments on every rank.

        Args:
            entries: The entries of all ranks, in one order.
            rows: (num_ranks, 3 * num_entries), what `as_row` returned on each.
            batch_size: Weight of this iteration in an epoch's mean, unless the user gave one.
        """
        for index, entry in enumerate(entries):
            values, weights, sizes = rows[:, _NUM_COLUMNS * index :][:, :_NUM_COLUMNS].unbind(1)
            options = dict(entry.options)
            options["batch_size"] = int(sizes.sum()) or max(batch_size, 1)
            if entry.metric is not None:
                value: Any = self._module.get_submodule(entry.metric)
            else:
                options.update(sync_dist=True, sync_dist_group=ALREADY_REDUCED)
                logged = weights > 0
                value = _reduce(entry.reduction, values[logged], weights[logged]).float()
            self._original_log(entry.name, value, **options)


def _reduce(reduction: str, values: Tensor, weights: Tensor) -> Tensor:
    if reduction in _REDUCTIONS:
        return _REDUCTIONS[reduction](values)
    total = weights.sum()
    # A weight of 0 may belong to a value that is no number, such as the mean of no targets.
    weighted = torch.where(weights > 0, values * weights, torch.zeros_like(values)).sum()
    return torch.where(total > 0, weighted / total, values.mean())
