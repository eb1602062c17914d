"""`lightning-hetero stragglers explain TRACE`: say why a run was slow.

Reads an operation trace (`straggler.traces`); `straggler.what_if` finds the causes.
"""

import argparse
import json
from pathlib import Path

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.texts import format_table, load_file, parse_yaml
from lightning_hetero.straggler.traces import Layout, read_operations
from lightning_hetero.straggler.what_if import answer, explain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.prog = "lightning-hetero stragglers explain"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Say why a run was slow, and what to do: a slow rank, unequal stages, micro-batches of\n"
        "unequal cost, a slow link, or pauses. Each cause's share is found by replaying the run\n"
        "without it, and with only it."
    )
    parser.epilog = (
        "example:\n"
        "  $ lightning-hetero stragglers explain operations/ --json shares.json\n"
        "  1.97 × slower than possible (46.65 s a step where 23.62 s are possible); 0.96 of the\n"
        "  excess is rank 0, 2.32 × slower than comparable ones: replace its device or give it\n"
        "  less work.\n\n"
        "Columns of a trace: step, rank, dp_rank, stage, optype, start_ts, duration, mb_id, and\n"
        "optionally mc (the chunk). Times are in seconds; if forwards would take more than 20 s,\n"
        "they are read as ms, µs or ns. Kinds (optype): forward-compute, backward-compute,\n"
        "forward-send, forward-recv, backward-send, backward-recv, optimizer, gc; any other is a\n"
        "collective. docs/slow-runs.md says more."
    )
    parser.add_argument(
        "trace",
        metavar="TRACE",
        type=Path,
        help="folder that TraceOperations wrote, or Parquet or JSON lines (.jsonl, .jsonl.gz)",
    )
    parser.add_argument(
        "--layout",
        metavar="META.yaml",
        type=Path,
        help="YAML file about the job, such as {tp_size: 4, layers: [8, 8], nodes: {0: a, 1: b}}",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write each cause's share as JSON"
    )


def run_explain(arguments: argparse.Namespace) -> int:
    """Print why the run of an operation trace was slow; return the exit code."""
    path, layout_path, json_path = arguments.trace, arguments.layout, arguments.json
    trace = read_operations(path)
    if layout_path is None and (path / "layout.yaml").is_file():
        layout_path = path / "layout.yaml"
    layout = Layout()
    if layout_path is not None:
        layout = load_file(
            layout_path,
            "layout",
            ConfigurationError,
            lambda text: Layout.from_dict(parse_yaml(text, "layout", ConfigurationError)),
        )
    found = explain(trace)
    if trace.unit_s < 1.0:
        print(f"Times are read in units of {trace.unit_s:g} s: in seconds forwards would be long.")
    if trace.num_left_out:
        print(f"Left out {trace.num_left_out} steps, of which the trace lacks operations.")
    print(answer(found, layout))
    rows = [
        (
            cause.kind,
            "" if cause.which is None else str(cause.which),
            *(f"{value:.2f}" for value in (cause.share, cause.removed, cause.kept)),
        )
        for cause in found.causes
    ]
    if rows:
        print(format_table(("cause", "which", "share", "only it removed", "only it kept"), rows))
    if json_path is not None:
        try:
            json_path.write_text(json.dumps(found.to_dict(), indent=1) + "\n")
        except OSError as error:
            raise ConfigurationError(f"Can't write {json_path}: {error}") from error
    return 0
