"""Run the benchmarks and print one table.

`python -m tests.benchmarks [WORD ...] [--json FILE]` ends with exit code 1 if a
benchmark failed; the others' rows are there all the same. Long ones can be run in parts: `--only`
takes rows whose name holds a text, `--repeats` and `--minutes` say how long.
"""

import argparse
import importlib
import inspect
import json
import pathlib
import sys
import traceback

from rich.console import Console

from tests.benchmarks.harness import Row, as_data, as_table, silence_trainers


def main() -> int:
    """Run the chosen benchmarks, print the table, write the JSON file, say what got worse."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("words", nargs="*", help="run only benchmarks whose name holds a word")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    parser.add_argument("--only", help="rows whose name holds this, where a benchmark has parts")
    parser.add_argument("--repeats", type=int, help="how often, where a benchmark can be told")
    parser.add_argument("--minutes", type=float, help="how long, where a benchmark can be told")
    parser.add_argument("--row-ms", type=float, help="what a sample takes, where a pause plays it")
    arguments = parser.parse_args()
    told = {key: getattr(arguments, key) for key in ("only", "repeats", "minutes", "row_ms")}
    told = {key: value for key, value in told.items() if value is not None}
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
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            data = json.dumps(as_data(rows, failed), indent=1)
            arguments.json.write_text(data + "\n", encoding="utf-8")
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(as_table(rows))
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    silence_trainers()
    sys.exit(main())
