"""Run the benchmarks and print one table.

`python -m tests.benchmarks [WORD ...] [--json FILE] [--compare FILE]` ends with exit code 1 if a
benchmark failed; the others' rows are there all the same. Long ones can be run in parts: `--only`
takes rows whose name holds a text, `--repeats` and `--minutes` say how long.
"""

import argparse
import importlib
import inspect
import pathlib
import sys
import traceback

from rich.console import Console

from tests.benchmarks.harness import Row, silence_trainers
from tests.benchmarks.report import Report


def main() -> int:
    """Run the chosen benchmarks, print the table, write the JSON file, say what got worse."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("words", nargs="*", help="run only benchmarks whose name holds a word")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    parser.add_argument("--compare", type=pathlib.Path, help="JSON file of an earlier run")
    parser.add_argument("--only", help="rows whose name holds this, where a benchmark has parts")
    parser.add_argument("--repeats", type=int, help="how often, where a benchmark can be told")
    parser.add_argument("--minutes", type=float, help="how long, where a benchmark can be told")
    parser.add_argument("--row-ms", type=float, help="what a sample takes, where a pause plays it")
    arguments = parser.parse_args()
    told = {key: getattr(arguments, key) for key in ("only", "repeats", "minutes", "row_ms")}
    told = {key: value for key, value in told.items() if value is not None}
    earlier = None if arguments.compare is None else Report.load(arguments.compare)
    names = sorted(path.stem for path in pathlib.Path(__file__).parent.glob("bench_*.py"))
    chosen = [n for n in names if not arguments.words or any(w in n for w in arguments.words)]
    rows: list[Row] = []
    failed: list[str] = []
    for name in chosen:
        print(f"{name} ...", flush=True)
        try:
            run = importlib.import_module(f"tests.benchmarks.{name}").run
            known = inspect.signature(run).parameters
            rows += run(**{key: value for key, value in told.items() if key in known})
        except Exception:  # One that fails must not lose the others' rows.
            traceback.print_exc()
            failed.append(name)
        if arguments.json:
            Report.of_this_machine(rows, failed).save(arguments.json)
    report = Report.of_this_machine(rows, failed)
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(report.as_table())
    if failed:
        print(f"failed: {', '.join(failed)}")
    if earlier is not None:
        print("\n".join(report.compare(earlier)))
    return 1 if failed else 0


if __name__ == "__main__":
    silence_trainers()
    sys.exit(main())
