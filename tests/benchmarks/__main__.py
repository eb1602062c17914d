"""Run the benchmarks and print one table: `python -m tests.benchmarks [WORD ...] [--json FILE]`."""

import argparse
import dataclasses
import datetime
import importlib
import json
import pathlib
import platform

from rich.console import Console
from rich.table import Table

from tests.benchmarks.harness import Row


def main() -> None:
    """Run the chosen benchmarks, print the table, write the JSON file."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("words", nargs="*", help="run only benchmarks whose name holds a word")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    names = sorted(path.stem for path in pathlib.Path(__file__).parent.glob("bench_*.py"))
    chosen = [n for n in names if not arguments.words or any(w in n for w in arguments.words)]
    rows: list[Row] = []
    for name in chosen:
        print(f"{name} ...", flush=True)
        rows += importlib.import_module(f"tests.benchmarks.{name}").run()
    Console(width=150).print(as_table(rows))
    if arguments.json:
        report = {
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.machine()}, {platform.python_version()}",
            "rows": [dataclasses.asdict(row) | {"met": row.met} for row in rows],
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def as_table(rows: list[Row]) -> Table:
    """Return the rows as a table for the terminal."""
    table = Table(title="Benchmarks: medians, ours and the peer in one run")
    for column in ("what", "ours", "peer", "unit", "value", "target", "met", "kind", "note"):
        table.add_column(column)
    for row in rows:
        peer = "-" if row.peer is None else f"{row.peer:.4g}"
        sign = "≤" if row.better == "lower" else "≥"
        cells = [row.name, f"{row.ours:.4g}", peer, row.unit, f"{row.value:.3g}"]
        table.add_row(
            *cells, f"{sign} {row.target:g}", "yes" if row.met else "NO", row.kind, row.note
        )
    return table


if __name__ == "__main__":
    main()
