"""The identity of a number that a step logs, and whether ranks' numbers go together."""

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
    """The call that the number is given to, instead of being logged."""
    argument: Argument = 0
    """As which argument."""
    dtype: torch.dtype = torch.float32
    """The dtype that the call gets it in."""
    formula: Formula | None = None
    """How it is made of parts, of which this is one."""
    part: int = 0
    """Which."""
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


def reduction_of(entry: LogEntry, known: Reduction | None) -> str:
    """Return what is known, else take the user's word for batches for micro-batches, too."""
    if known is not None and known.kind in JOINABLE:
        return str(known.kind)
    if entry.formula is not None:
        return "mean"  # Of a constant part.
    reduce_fx = dict(entry.options).get("reduce_fx", "mean")
    name = str(getattr(reduce_fx, "__name__", reduce_fx))
    return {"amin": "min", "amax": "max"}.get(name, name)


def check_range(entry: LogEntry, least: Tensor, largest: Tensor) -> None:
    """Refuse what is mixed and differs between micro-batches; warn of what is guessed and does."""
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
