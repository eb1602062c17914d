"""Collect what a step logs on last stages, and replay it on every rank.

Only last stages run the whole step, and each sees one pipeline's micro-batches. So `self.log` is
recorded there, reduced over micro-batches and pipelines (see `reductions`; what isn't known there
is averaged by target tokens, or reduced by its `reduce_fx`), and replayed with the reduced value on
all ranks: progress bar, loggers, `ModelCheckpoint(monitor=...)` and `EarlyStopping` see the same
numbers everywhere.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from torch import Tensor, nn

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.results.log_entries import (
    LogEntry,
    check_names,
    check_range,
    reduction_of,
)
from lightning_hetero.runtime.results.metrics import Argument, MetricCall, StepMetrics
from lightning_hetero.runtime.results.numbers.kinds import (
    CONSTANT,
    JOINABLE,
    UNKNOWN,
    WRITTEN,
    Count,
    Kind,
    as_weight,
    ends_of,
    join_values,
    ratio_of,
)
from lightning_hetero.runtime.results.numbers.reductions import Reductions
from lightning_hetero.runtime.results.numbers.written_numbers import (
    Rows,
    count_of,
    known_by_rows,
    may_count,
    rows_counted,
)
from lightning_hetero.runtime.results.padded_means import PaddedMeans
from lightning_hetero.runtime.unknown import check_known

__all__ = ["ALREADY_REDUCED", "SAME_EVERYWHERE", "StepLogs"]

ALREADY_REDUCED = "already reduced"
"""Given as `sync_dist_group`: the value is the same on all ranks, and the strategy leaves it."""

SAME_EVERYWHERE = "same everywhere: "
"""How a `sync_dist_group` begins, before the name, if the strategy must check that ranks agree."""

_NUM_COLUMNS = 5
_OF_CONSTANTS = 1e-30
"""Factor of the weights of constants: beside numbers over samples they don't change a mean."""
_NEUTRAL: dict[str, float] = {Kind.MAX: -math.inf, Kind.MIN: math.inf}
"""By reduction: the neutral value; 0 for others."""


class _Pending(NamedTuple):
    """One micro-batch's value, which is dropped if the step doesn't run to its end."""

    value: Any
    batch_size: int
    rows: Rows
    """Rows that it counts, as the user's call shows."""


@dataclass(frozen=True)
class _Logged:
    """One micro-batch's value under an entry."""

    value: Tensor
    weight: Tensor
    batch_size: int
    range: Sequence[Tensor]
    """Numbers in which micro-batches must agree: `ratio_of` mixed means, or a guessed or written
    value."""


class StepLogs:
    """The logged values of one iteration on one rank.

    Args:
        module: The LightningModule whose `log` is recorded.
        device: Where the sums are kept.
        metrics: The module's metrics, if it has any.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, metrics: StepMetrics | None = None
    ) -> None:
        self._module = module
        self._metrics = metrics
        self._device = device
        self._original_log: Callable[..., None] = partial(
            type(module).log,  # type: ignore[attr-defined]
            module,
        )
        self._signature = inspect.signature(self._original_log)
        self._batch_size = 1
        self._module.log = self._log_in_hook  # type: ignore[assignment]
        self._pending: dict[LogEntry, _Pending] = {}
        self._values: dict[LogEntry, list[_Logged]] = {}

    @cached_property
    def _places_of_buffers(self) -> list[dict[str, Tensor | None]]:
        return [part._buffers for part in self._module.modules() if part._buffers]

    def buffers(self) -> list[Tensor]:
        """Return the current buffers of those submodules that had any at the first call."""
        found = (item for place in self._places_of_buffers for item in place.values())
        return [item for item in found if item is not None]

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
            del own["all_gather"]
            own["log"] = self._log_in_hook

    def remove(self) -> None:
        """Restore the methods of the module and its metrics."""
        del self._module.log
        if self._metrics is not None:
            self._metrics.remove()

    def _log_in_hook(self, *args: Any, **kwargs: Any) -> None:
        """Log a hook's value; one that is kept for the epoch must be the same on every rank."""
        options = self._bind(args, kwargs)
        if isinstance(options["value"], Tensor) and options["value"].numel() != 1:
            raise StepError(
                f"{options['name']!r} that is logged in a hook has {options['value'].numel()} "
                "elements and not one. In hooks each rank has only its slices of parameters, some "
                "without rows: log what is made of a parameter in a step."
            )
        hook = str(getattr(self._module, "_current_fx_name", None))
        if "batch" in hook and options.get("batch_size") is None:
            # The hook's own batch is that of this rank's pipeline.
            options["batch_size"] = self._batch_size
        checks = not (options.get("sync_dist") or options.get("rank_zero_only"))
        is_metric = isinstance(options["value"], nn.Module)
        if checks and not is_metric and self._is_of_epoch(options):
            options.update(sync_dist=True, sync_dist_group=SAME_EVERYWHERE + options["name"])
        self._original_log(**options)

    def _is_of_epoch(self, options: dict[str, Any]) -> bool:
        """Whether a value is kept for the epoch alone, where each rank reads it once."""
        hook = str(getattr(self._module, "_current_fx_name", None))
        if options.get("on_step") is None and _FxValidator.functions.get(hook):
            on_step, _ = _FxValidator.get_default_logging_levels(hook, None, None)
            return not on_step
        return not options.get("on_step")

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        options: dict[str, Any] = {}
        for key, value in self._signature.bind(*args, **kwargs).arguments.items():
            kind = self._signature.parameters[key].kind
            options.update(value if kind is inspect.Parameter.VAR_KEYWORD else {key: value})
        return options

    def _record(self, *args: Any, **kwargs: Any) -> None:
        options = self._bind(args, kwargs)
        name, value = options.pop("name"), options.pop("value")
        # Varies from batch to batch, so it is a number of the row and not part of the entry.
        batch_size = options.pop("batch_size", None) or 0
        metric = None
        if isinstance(value, nn.Module):
            metric = next((key for key, item in self._module.named_modules() if item is value), "")
        rows = rows_counted(1, key=name) if may_count(value) else None
        entry = LogEntry(name, tuple(options.items()), metric)
        self._pending[entry] = _Pending(value, int(batch_size), rows)

    def drop_microbatch(self) -> None:
        """Discard the logs of a step that didn't run to its end."""
        self._pending.clear()
        if self._metrics is not None:
            self._metrics.take_numbers()

    def keep_microbatch(
        self, weight: Tensor, reductions: Reductions, means: PaddedMeans | None = None
    ) -> None:
        """Take over what one micro-batch logged.

        Args:
            weight: Its number of target tokens.
            reductions: What is known of its numbers.
            means: Looks for means that count pads; None if nothing does.
        """
        for call, given in [] if self._metrics is None else self._metrics.take_numbers(reductions):
            for argument, (value, rows) in given.items():
                dtype = torch.as_tensor(value).dtype
                entry = LogEntry(call.metric, (), call=call, argument=argument, dtype=dtype)
                self._pending[entry] = _Pending(value, 0, rows)
        for entry, (value, batch_size, rows) in self._parts(reductions):
            known = CONSTANT if entry.metric is not None else reductions.of(value)
            if (known is None or known.kind is Kind.CONSTANT) and rows is not None:
                told, num_samples = reductions.told, reductions.num_samples
                known = known_by_rows(value, rows, told, num_samples) or known
            if means is not None:
                means.see(entry.told, known)
            counts = known is not None and known.kind is Kind.CONSTANT and known.count == 1
            known = UNKNOWN if counts else known
            count = None if known else count_of(value, reductions.num_samples)
            if entry.call is not None:
                known = known or count
            own, others = weight, tuple[Count, ...]()
            if known is not None and known.kind is Kind.MEAN:
                own, others = as_weight(known.count, self._device), known.others
            elif known is not None and known.kind is Kind.CONSTANT and known is not WRITTEN:
                own = own * _OF_CONSTANTS  # Such as the zero that stands for a mean of nothing.
            reduction = "mean" if known is WRITTEN else reduction_of(entry, known)
            is_known = known is not None and known.kind in (*JOINABLE, Kind.CONSTANT)
            is_guessed = not is_known and reduction == "mean"
            doubt: Any = "guessed" if is_guessed else "mixed" if others else ""
            may_count = count is not None and (type(value) is int or value > 1)
            if is_guessed and (counts or may_count):
                doubt = "counted"
            number = torch.zeros(()) if entry.metric is not None else value
            number = torch.as_tensor(number, dtype=torch.float64, device=self._device).detach()
            number = number.reshape(())
            spread = [number] if is_guessed or known is WRITTEN else ratio_of(others, own)
            logged = _Logged(number, own, batch_size, spread)
            reduced = replace(entry, reduction=reduction, doubt=doubt)
            self._values.setdefault(reduced, []).append(logged)
        self._pending.clear()

    def _parts(self, reductions: Reductions) -> Iterator[tuple[LogEntry, _Pending]]:
        """Yield what was logged, with the parts of a formula in place of its result."""
        for entry, item in self._pending.items():
            check_known(getattr(item.value, "metric_state", item.value), f"{entry.told} needs")
            made = None if entry.metric is not None else reductions.formulas.of(item.value)
            if made is None:
                yield entry, item
                continue
            for place, part in enumerate(made.parts):
                of_part = item._replace(value=part, rows=None)
                yield replace(entry, formula=made.formula, part=place), of_part

    @property
    def entries(self) -> tuple[LogEntry, ...]:
        """The entries logged so far, in order."""
        return tuple(self._values)

    def as_row(self, entries: Sequence[LogEntry]) -> Tensor:
        """Return (value, weight, batch size, least and largest of its range) of entries, float64.

        The weight is 0 for an entry not logged, the batch size 0 for one logged without it.
        """
        row = torch.zeros(_NUM_COLUMNS * len(entries), dtype=torch.float64, device=self._device)
        for index, entry in enumerate(entries):
            logged = self._values.get(entry)
            if logged:
                values = torch.stack([item.value for item in logged])
                weights = torch.stack([item.weight for item in logged])
                first = _NUM_COLUMNS * index
                row[first] = join_values(entry.reduction, values, weights)
                row[first + 1] = weights.sum().clamp(min=torch.finfo(torch.float32).tiny)
                row[first + 2] = sum(item.batch_size for item in logged)
                spread = [number for item in logged for number in item.range]
                is_known_at_times = bool(spread) and not all(item.range for item in logged)
                if is_known_at_times and entry.doubt != "mixed":
                    row[first + 3], row[first + 4] = -math.inf, math.inf
                else:
                    row[first + 3], row[first + 4] = ends_of(spread, self._device)
        return row

    def replay(self, entries: Sequence[LogEntry], rows: Tensor, batch_size: int) -> None:
        """Log the value reduced over all ranks' rows, with the same arguments on every rank.

        Args:
            entries: The entries of all ranks, in one order.
            rows: (num_ranks, columns * num_entries), what `as_row` returned on each.
            batch_size: Weight of this iteration in an epoch's mean, unless the user gave one.

        Raises:
            StepError: One name stands for several kinds of numbers.
        """
        check_names(entries)
        self._batch_size = max(batch_size, 1)
        self._feed_metrics(entries, rows)
        for entry, number, sizes in _numbers(entries, rows):
            if entry.call is not None:
                continue
            options = dict(entry.options)
            options["batch_size"] = _batch_size_of(sizes.sum(), self._batch_size)
            if entry.metric is not None:
                value: Any = self._module.get_submodule(entry.metric)
                if self._metrics is not None and not self._is_of_epoch(options):
                    self._metrics.set_step_value(value)
            else:
                options.update(sync_dist=True, sync_dist_group=ALREADY_REDUCED)
                value = number.float()
            self._original_log(entry.name, value, **options)

    def _feed_metrics(self, entries: Sequence[LogEntry], rows: Tensor) -> None:
        """Call metrics with the batch's numbers."""
        calls: dict[MetricCall, dict[Argument, Tensor]] = {}
        for entry, number, _ in _numbers(entries, rows):
            if entry.call is not None:
                given = calls.setdefault(entry.call, {})
                given[entry.argument] = number.to(entry.dtype)
        if calls and self._metrics is not None:
            self._metrics.feed(calls)

    def check(self, entries: Sequence[LogEntry], rows: Tensor) -> None:
        """Look at the ranges of what was logged; rows as in `replay`, but on the CPU.

        Raises:
            StepError: The ratios of mixed means differ between micro-batches.
        """
        for entry, (_, weights, _, least, largest) in _with_columns(entries, rows):
            if entry.metric is None:
                logged = weights > 0
                check_range(entry, least[logged], largest[logged])


def _refuse_gathering(*_: Any, **__: Any) -> None:
    raise StepError(
        "A step calls self.all_gather, but only last stages run steps to their end, so the others "
        "would never answer. Log or return what shall be gathered: logs are those of the whole "
        "batch, and hooks get what all ranks' steps have returned."
    )


def _numbers(entries: Sequence[LogEntry], rows: Tensor) -> Iterator[tuple[LogEntry, Any, Tensor]]:
    """Yield entries with their numbers of the batch and the ranks' batch sizes, (num_ranks,)."""
    parts: dict[LogEntry, list[Tensor]] = {}
    for entry, (values, weights, sizes, *_) in _with_columns(entries, rows):
        number = _joined(entry, values, weights)
        if entry.formula is not None:
            found = parts.setdefault(replace(entry, part=0, reduction="", doubt=""), [])
            found.append(number)
            if len(found) < entry.formula.num_parts:
                continue
            number = entry.formula.compute(found)
        yield entry, number, sizes


def _joined(entry: LogEntry, values: Tensor, weights: Tensor) -> Tensor:
    """Return the number of the batch; weights are 0 where ranks have none."""
    # The neutral value stands in for values that weren't logged, so that no host has to choose.
    known = values.masked_fill(weights <= 0, _NEUTRAL.get(entry.reduction, 0.0))
    return join_values(entry.reduction, known, weights)


def _with_columns(
    entries: Sequence[LogEntry], rows: Tensor
) -> Iterator[tuple[LogEntry, tuple[Tensor, ...]]]:
    for index, entry in enumerate(entries):
        yield entry, rows[:, _NUM_COLUMNS * index :][:, :_NUM_COLUMNS].unbind(1)


def _batch_size_of(given: Tensor, otherwise: int) -> Any:
    """Return the batch size that steps gave, else `otherwise`, without waiting for a device."""
    if given.device.type == "cpu":
        return int(given) or otherwise
    return torch.where(given > 0, given, otherwise).long()
