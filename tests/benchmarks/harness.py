"""Time ours and the peer side by side: interleaved repeats, medians, ratios, one table.

A benchmark module `bench_<topic>.py` defines `run() -> list[Row]`. `python -m tests.benchmarks`
runs them all, `python -m tests.benchmarks grouping` only those whose name holds that word,
`--json FILE` keeps the figures.
"""

import datetime
import logging
import math
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Literal, Self

from rich.table import Table

_SILENT = "LIGHTNING_HETERO_SILENT_BENCHMARKS"


def silence_trainers() -> None:
    """Keep what Lightning says out of the output, of processes started from now on, too."""
    os.environ |= {_SILENT: "1", "POSSIBLE_USER_WARNINGS": "off"}
    # Not by Lightning's loggers, whose levels its import sets again.
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")


if _SILENT in os.environ:
    silence_trainers()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table of ratios."""

    name: str
    """What was measured, with its size."""
    ours: float
    """Our figure (median)."""
    target: float
    """Bound for `value`."""
    peer: float | None = None
    """The peer's figure of the same run, None where the target is absolute."""
    unit: str = "s"
    """Unit of both figures."""
    better: Literal["lower", "higher"] = "lower"
    """Whether `value` must stay below or reach the target."""
    kind: Literal["measured", "simulated"] = "measured"
    """Whether the clock or the simulator gave the figures."""
    value: float = math.nan
    """What the target bounds: if it isn't given, ours / peer where lower is better, peer / ours
    where higher is, and `ours` without a peer."""
    note: str = ""
    """Who the peer is, what the figures rest on."""

    def __post_init__(self) -> None:
        if math.isnan(self.value):
            value = self.ours
            if self.peer is not None:
                is_lower = self.better == "lower"
                value = self.ours / self.peer if is_lower else self.peer / self.ours
            object.__setattr__(self, "value", value)

    @classmethod
    def of_share(cls, name: str, value: float, target: float, note: str) -> Self:
        """Return the row of a simulated share that must stay below its target, without a peer."""
        return cls(name=name, ours=value, unit="share", target=target, kind="simulated", note=note)

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        return self.value <= self.target if self.better == "lower" else self.value >= self.target


def median_times_s(*functions: Callable[[], object], repeats: int = 7) -> list[float]:
    """Return each function's median wall time, repeats interleaved, after one warm-up."""
    for function in functions:
        function()
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, seconds in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


def as_table(rows: list[Row]) -> Table:
    """Return the rows of a run that ends now, for the terminal."""
    table = Table(title=f"Ours and the peer in one run, medians. {_when()}, {_machine()}")
    for column in ("what", "ours", "peer", "unit", "ratio", "target", "met", "kind", "note"):
        is_number = column in ("ours", "peer", "ratio", "target")
        table.add_column(column, justify="right" if is_number else "left")
    for row in rows:
        peer = "-" if row.peer is None else f"{row.peer:.4g}"
        sign = "≤" if row.better == "lower" else "≥"
        cells = [row.name, f"{row.ours:.4g}", peer, row.unit, f"{row.value:.3g}"]
        met = "yes" if row.met else "NO"
        table.add_row(*cells, f"{sign} {row.target:g}", met, row.kind, row.note)
    return table


def as_data(rows: list[Row], failed: list[str]) -> dict[str, Any]:
    """Return the figures of a run that ends now, for JSON."""
    figures = [asdict(row) | {"met": row.met} for row in rows]
    return {"date": _when(), "machine": _machine(), "rows": figures, "failed": failed}


def _when() -> str:
    return datetime.date.today().isoformat()


def _machine() -> str:
    python, torch = platform.python_version(), version("torch")
    return f"{os.cpu_count()} × {platform.machine()}, Python {python}, torch {torch}"
