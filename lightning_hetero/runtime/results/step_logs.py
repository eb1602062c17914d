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
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.results.metrics import Argument, MetricCall, StepMetrics
from lightning_hetero.runtime.results.number_kinds import (
    CONSTANT,
    JOINABLE,
    Count,
    Kind,
    Reduction,
    as_weight,
    check_ratios,
    ends_of,
    join_values,
    ratio_of,
)
from lightning_hetero.runtime.results.reductions import Reductions
from lightning_hetero.runtime.unknown import check_known

__all__ = ["ALREADY_REDUCED", "SAME_EVERYWHERE", "LogEntry", "StepLogs"]

ALREADY_REDUCED = "already reduced"
"""Given as `sync_dist_group`: the value is the same on all ranks, and the strategy leaves it."""

SAME_EVERYWHERE = "same everywhere: "
"""Begins a `sync_dist_group`, before the name: the strategy checks that ranks have one value."""

_NUM_COLUMNS = 5
_NEUTRAL: dict[str, float] = {Kind.MAX: -math.inf, Kind.MIN: math.inf}
"""By reduction, a value that changes nothing; 0 for others."""


@dataclass(frozen=True)
class LogEntry:
    """The identity of a logged quantity, apart from its value."""

    name: str
    options: tuple[tuple[str, Any], ...] = field(compare=False)
    """Keyword arguments of `self.log`, without name and value."""
    metric: str | None = None
    """Name of the submodule if a torchmetrics `Metric` is logged; it reduces itself."""
    call: MetricCall | None = None
    """What the number is given to, instead of being logged."""
    argument: Argument = 0
    """As which argument."""
    dtype: torch.dtype = torch.float32
    """What it gets there."""
    reduction: str = "mean"
    """How values of several micro-batches become one: mean, sum, min or max."""
    doubt: Literal["", "mixed", "guessed", "counted"] = field(default="", compare=False)
    """Why that may be wrong: several means in one value, nothing is known of it, or it may count
    samples."""

    @property
    def told(self) -> str:
        """Begins a message about the number."""
        if self.call is not None:
            return f"What metric {self.call.metric!r} gets in a step"
        return f"What is logged as {self.name!r}"


def _reduction_of(entry: LogEntry, known: Reduction | None) -> str:
    """Return what is known, else take the user's word for batches for micro-batches, too."""
    if known is not None and known.kind in JOINABLE:
        return str(known.kind)
    reduce_fx = dict(entry.options).get("reduce_fx", "mean")
    name = str(getattr(reduce_fx, "__name__", reduce_fx))
    return {"amin": "min", "amax": "max"}.get(name, name)


@dataclass(frozen=True)
class _Logged:
    """One micro-batch's value under an entry."""

    value: Tensor
    weight: Tensor
    batch_size: int
    range: Sequence[Tensor]
    """In what micro-batches must agree: `ratio_of` what is mixed, or the value that is guessed."""


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
        self._pending: dict[LogEntry, tuple[Any, int]] = {}
        self._values: dict[LogEntry, list[_Logged]] = {}

    @contextmanager
    def recording(self, *, is_cut: bool = True, is_last: bool = True) -> Iterator[None]:
        """Record instead of log inside this context; for the arguments see `StepMetrics`."""
        self._pending.clear()
        self._values.clear()
        self._module.log = self._record  # type: ignore[assignment]
        self._module.all_gather = _refuse_gathering  # type: ignore[assignment]
        try:
            metrics = self._metrics
            with metrics.recording(is_cut=is_cut, is_last=is_last) if metrics else nullcontext():
                yield
        finally:
            del self._module.all_gather
            self._module.log = self._log_in_hook  # type: ignore[assignment]

    def remove(self) -> None:
        """Give the module and its metrics their own methods back."""
        del self._module.log
        if self._metrics is not None:
            self._metrics.remove()

    def _log_in_hook(self, *args: Any, **kwargs: Any) -> None:
        """Log what a hook gives; what an epoch keeps of it must be the same on every rank."""
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
        self._pending[LogEntry(name, tuple(options.items()), metric)] = value, int(batch_size)

    def drop_microbatch(self) -> None:
        """Forget what a step logged that didn't run to its end."""
        self._pending.clear()
        if self._metrics is not None:
            self._metrics.take_numbers()

    def keep_microbatch(self, weight: Tensor, reductions: Reductions) -> None:
        """Take over what one micro-batch logged.

        Args:
            weight: Its number of target tokens.
            reductions: What is known of its numbers.
        """
        for call, given in [] if self._metrics is None else self._metrics.take_numbers(reductions):
            for argument, value in given.items():
                dtype = torch.as_tensor(value).dtype
                entry = LogEntry(call.metric, (), call=call, argument=argument, dtype=dtype)
                self._pending[entry] = value, 0
        for entry, (value, batch_size) in self._pending.items():
            seen = getattr(value, "metric_state", value)
            check_known(seen, f"{entry.told} needs")
            known = CONSTANT if entry.metric is not None else reductions.of(value)
            count = None if known else reductions.of_count(value)
            if entry.call is not None:
                known = known or count
            own, others = weight, tuple[Count, ...]()
            if known is not None and known.kind is Kind.MEAN:
                own, others = as_weight(known.count, self._device), known.others
            reduction = _reduction_of(entry, known)
            is_known = known is not None and known.kind in (*JOINABLE, Kind.CONSTANT)
            is_guessed = not is_known and reduction == "mean"
            doubt: Any = "guessed" if is_guessed else "mixed" if others else ""
            doubt = "counted" if is_guessed and count is not None and value > 1 else doubt
            number = torch.zeros(()) if entry.metric is not None else value
            number = torch.as_tensor(number, dtype=torch.float64, device=self._device).detach()
            number = number.reshape(())
            spread = [number] if is_guessed else ratio_of(others, own)
            logged = _Logged(number, own, batch_size, spread)
            reduced = replace(entry, reduction=reduction, doubt=doubt)
            self._values.setdefault(reduced, []).append(logged)
        self._pending.clear()

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
        _check_names(entries)
        self._batch_size = max(batch_size, 1)
        self._feed_metrics(entries, rows)
        for entry, (values, weights, sizes, *_) in _with_columns(entries, rows):
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
                value = _joined(entry, values, weights).float()
            self._original_log(entry.name, value, **options)

    def _feed_metrics(self, entries: Sequence[LogEntry], rows: Tensor) -> None:
        """Call metrics with the batch's numbers."""
        calls: dict[MetricCall, dict[Argument, Tensor]] = {}
        for entry, (values, weights, *_) in _with_columns(entries, rows):
            if entry.call is not None:
                given = calls.setdefault(entry.call, {})
                given[entry.argument] = _joined(entry, values, weights).to(entry.dtype)
        if calls and self._metrics is not None:
            self._metrics.feed(calls)

    def check(self, entries: Sequence[LogEntry], rows: Tensor) -> None:
        """Look at the ranges of what was logged; rows as in `replay`, but on the CPU.

        Raises:
            StepError: A name stands for numbers that don't go together.
        """
        for entry, (_, weights, _, least, largest) in _with_columns(entries, rows):
            if entry.metric is None:
                logged = weights > 0
                _check_range(entry, least[logged], largest[logged])


def _refuse_gathering(*_: Any, **__: Any) -> None:
    raise StepError(
        "A step calls self.all_gather, but only last stages run steps to their end, so the others "
        "would never answer. Log or return what shall be gathered: logs are those of the whole "
        "batch, and hooks get what all ranks' steps have returned."
    )


def _joined(entry: LogEntry, values: Tensor, weights: Tensor) -> Tensor:
    """Return the number of the batch; weights are 0 where ranks have none."""
    # In place of what wasn't logged comes what changes nothing: no host has to choose.
    known = values.masked_fill(weights <= 0, _NEUTRAL.get(entry.reduction, 0.0))
    return join_values(entry.reduction, known, weights)


def _with_columns(
    entries: Sequence[LogEntry], rows: Tensor
) -> Iterator[tuple[LogEntry, tuple[Tensor, ...]]]:
    for index, entry in enumerate(entries):
        yield entry, rows[:, _NUM_COLUMNS * index :][:, :_NUM_COLUMNS].unbind(1)


def _batch_size_of(given: Tensor, otherwise: int) -> Any:
    """Return what the user's steps gave, if they did; what an accelerator has summed isn't read."""
    if given.device.type == "cpu":
        return int(given) or otherwise
    return torch.where(given > 0, given, otherwise).long()


def _check_range(entry: LogEntry, least: Tensor, largest: Tensor) -> None:
    """Refuse what is mixed and differs between micro-batches; warn of what is guessed and does."""
    if not entry.doubt or not least.numel():
        return
    low, high = float(least.min()), float(largest.max())
    if entry.doubt == "mixed":
        check_ratios(low, high, f"number {entry.name!r}")
    elif entry.doubt == "counted":
        rank_zero_warn(
            f"{entry.told} is a whole number that may count the samples or tokens of a micro-batch."
            " Those of micro-batches are averaged, so it isn't what one device has. Log a sum over "
            "samples, such as `(ids >= 0).sum()`, if it counts."
        )
    elif low < high:
        rank_zero_warn(
            f"{entry.told} isn't known to be a mean, sum or extreme over "
            "samples, so the values of micro-batches are averaged by target tokens, which may not "
            "be what one device has. Log a mean or sum, or a torchmetrics metric."
        )


def _check_names(entries: Sequence[LogEntry]) -> None:
    reductions: dict[tuple[Any, ...], str] = {}
    for entry in entries:
        key = entry.name, entry.metric, entry.call, entry.argument
        if reductions.setdefault(key, entry.reduction) != entry.reduction:
            raise StepError(
                f"{entry.name!r} is logged as a {entry.reduction} over samples in one micro-batch "
                f"and as a {reductions[key]} in another, so no plan gives what one device would. "
                "Log the same kind of number in every step."
            )
