"""What a run of the benchmarks found: as a table, as JSON, and beside an earlier run."""

import datetime
import json
import os
import pathlib
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Self

from rich.table import Table

from tests.benchmarks.harness import Row

TOLERANCE = 0.1
"""Share by which a ratio may get worse before it is said: what shared machines do to medians."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The rows of one run and where it ran."""

    date: str
    machine: str
    rows: tuple[Row, ...]
    failed: tuple[str, ...] = ()
    """Benchmarks that ended with an error."""

    @classmethod
    def of_this_machine(cls, rows: list[Row], failed: list[str]) -> Self:
        """Return the report of a run that ends now."""
        return cls(
            date=datetime.date.today().isoformat(),
            machine=f"{os.cpu_count()} × {platform.machine()}, Python {platform.python_version()}, "
            f"torch {version('torch')}",
            rows=tuple(rows),
            failed=tuple(failed),
        )

    @classmethod
    def load(cls, path: pathlib.Path) -> Self:
        """Read what `save` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = [{k: v for k, v in row.items() if k != "met"} for row in data["rows"]]
        return cls(
            date=data["date"],
            machine=data["machine"],
            rows=tuple(Row(**row) for row in rows),
            failed=tuple(data.get("failed", ())),
        )

    def save(self, path: pathlib.Path) -> None:
        """Write all figures, for comparing runs."""
        data = asdict(self) | {"rows": [asdict(row) | {"met": row.met} for row in self.rows]}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    def as_table(self) -> Table:
        """Return the rows as a table for the terminal."""
        table = Table(title=f"Ours and the peer in one run, medians. {self.date}, {self.machine}")
        for column in ("what", "ours", "peer", "unit", "ratio", "target", "met", "kind", "note"):
            table.add_column(column, justify="right" if column in _NUMBERS else "left")
        for row in self.rows:
            peer = "-" if row.peer is None else f"{row.peer:.4g}"
            sign = "≤" if row.better == "lower" else "≥"
            cells = [row.name, f"{row.ours:.4g}", peer, row.unit, f"{row.value:.3g}"]
            table.add_row(
                *cells, f"{sign} {row.target:g}", "yes" if row.met else "NO", row.kind, row.note
            )
        return table

    def compare(self, earlier: "Report") -> list[str]:
        """Return lines on what got worse since an earlier run."""
        now = {row.name: row for row in self.rows}
        lines = []
        for before in earlier.rows:
            row = now.get(before.name)
            if row is None:
                continue
            if before.met and not row.met:
                lines.append(f"  missed  {_change(before, row)}, target {row.target:g}")
            elif _worsening(before, row) > TOLERANCE:
                lines.append(f"  worse   {_change(before, row)}")
        missing = sum(row.name not in now for row in earlier.rows)
        if missing:
            lines.append(f"  {missing} rows of then weren't measured now")
        head = f"Compared with {earlier.date}, {earlier.machine}:"
        return [head, *lines] if lines else [f"{head} nothing got worse."]


_NUMBERS = ("ours", "peer", "ratio", "target")


def _worsening(before: Row, now: Row) -> float:
    """Return by which share of what it was a ratio is worse, below 0 if it is better."""
    rise = (now.value - before.value) / max(abs(before.value), 1e-9)
    return rise if now.better == "lower" else -rise


def _change(before: Row, now: Row) -> str:
    return f"{now.name}: {before.value:.3g} → {now.value:.3g}"
