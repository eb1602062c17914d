"""The identity of a number that a step logs, and checks that ranks' numbers can be joined."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.results.metrics import Argument, MetricCall
from lightning_hetero.runtime.results.numbers.formulas import Formula
from lightning_hetero.runtime.results.numbers.kinds import JOINABLE, Reduction, check_ratios

__all__ = ["LogEntry", "check_names", "check_range", "reduction_of"]


@dataclass(frozen=True)
class LogEntry:
    """The identity of a logged quantity, apart from its value."""

    name: str
    options: tuple[tuple[str, Any], ...] = field(compare=False)
    """Keyword arguments of `self.log`, without name and value."""
    metric: str | None = None
    """Name of the submodule if a torchmetrics `Metric` is logged; it reduces itself."""
    call: MetricCall | None = None
    """The call of a metric that gets the number, which then isn't logged."""
    argument: Argument = 0
    """The argument of that call."""
    dtype: torch.dtype = torch.float32
    """The dtype of that argument."""
    formula: Formula | None = None
    """How the logged number is computed from parts, of which this entry is one."""
    part: int = 0
    """Index of the part."""
    reduction: str = "mean"
    """How values of several micro-batches become one: mean, sum, min or max."""
    doubt: Literal["", "mixed", "guessed", "counted"] = field(default="", compare=False)
    """Why that may be wrong: the value has several means, is of unknown kind, or may count
    samples."""

    @property
    def told(self) -> str:
        """How a message about the number begins."""
        if self.call is not None:
            return f"What metric {self.call.metric!r} gets in a step"
        return f"What is logged as {self.name!r}"


def reduction_of(entry: LogEntry, known: Reduction | None) -> str:
    """Return the known reduction, else the user's `reduce_fx`, which is meant for batches."""
    if known is not None and known.kind in JOINABLE:
        return str(known.kind)
    if entry.formula is not None:
        return "mean"  # The part is a constant.
    reduce_fx = dict(entry.options).get("reduce_fx", "mean")
    name = str(getattr(reduce_fx, "__name__", reduce_fx))
    return {"amin": "min", "amax": "max"}.get(name, name)


def check_range(entry: LogEntry, least: Tensor, largest: Tensor) -> None:
    """Raise StepError if mixed means differ between micro-batches; warn if guessed values do."""
    if not least.numel():
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
    elif low < high or (low == high and least.max() == math.inf):  # Known on some ranks only.
        rank_zero_warn(
            f"{entry.told} isn't known to be a mean, sum or extreme over "
            "samples, so the values of micro-batches are averaged by target tokens, which may not "
            "be what one device has. Log a mean or sum, or a torchmetrics metric."
        )


def check_names(entries: Sequence[LogEntry]) -> None:
    """Refuse names that stand for several kinds of numbers.

    Raises:
        StepError: On every rank alike.
    """
    reductions: dict[tuple[Any, ...], str] = {}
    formulas: dict[tuple[Any, ...], Formula | None] = {}
    for entry in entries:
        key = entry.name, entry.metric, entry.call, entry.argument
        if formulas.setdefault(key, entry.formula) != entry.formula:
            raise StepError(
                f"{entry.name!r} is computed from means and sums over samples in one way in one "
                "micro-batch and otherwise in another, so no plan gives what one device would. "
                "Log the means and sums themselves."
            )
        if reductions.setdefault((*key, entry.part), entry.reduction) != entry.reduction:
            raise StepError(
                f"{entry.name!r} is logged as a {entry.reduction} over samples in one micro-batch "
                f"and as a {reductions[*key, entry.part]} in another, so no plan gives what one "
                "device would. Log the same kind of number in every step."
            )
