"""`lightning-hetero stragglers FILE...`: what slowed a run, and what was done.

Reads the event log of a run with this package's callbacks, or recordings of any job, one file per
rank: `straggler.any_job` says which. Prints a table of changes, findings and actions; `report`
draws them.

`lightning-hetero stragglers explain TRACE [--layout META.yaml] [--json FILE]` reads an operation
trace instead, and says why the run was slow.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.texts import format_table, load_file, parse_yaml
from lightning_hetero.straggler import (
    Event,
    Finding,
    IterationEvent,
    find_changes,
    read_events,
    read_times,
)
from lightning_hetero.straggler.any_job import is_event_log
from lightning_hetero.straggler.traces import Layout, read_operations
from lightning_hetero.straggler.what_if import answer, explain

__all__ = ["add_arguments", "run_stragglers", "summarise"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.description = (
        "Show when a run became slower or faster, why, and what was done. A FILE is an event log "
        "of StragglerMonitor, or a recording of one rank of any job: a torch profiler's trace, an "
        "NCCL flight recorder's dump, what lightning_hetero.straggler.record() wrote, or a list of "
        "iteration times in seconds."
    )
    parser.add_argument(
        "files", metavar="FILE", type=Path, nargs="+", help="event log or recording"
    )
    parser.epilog = (
        "`lightning-hetero stragglers explain TRACE` says why a run is slow. TRACE is a folder "
        "that TraceOperations wrote, or an operation trace (Parquet or JSON lines) with columns "
        "step, rank, dp_rank, stage, optype, start_ts, duration, mb_id."
    )
    explaining = parser.add_argument_group("options of explain")
    explaining.add_argument(
        "--layout",
        metavar="META.yaml",
        type=Path,
        help="YAML file about the job, such as {tp_size: 4, layers: [8, 8], nodes: {0: a, 1: b}}",
    )
    explaining.add_argument(
        "--json", metavar="FILE", type=Path, help="write each cause's share as JSON"
    )


def run_stragglers(arguments: argparse.Namespace) -> int:
    """Print the table, or the explanation; return the exit code."""
    if str(arguments.files[0]) == "explain" and len(arguments.files) == 2:
        return _explain(arguments.files[1], arguments.layout, arguments.json)
    if arguments.layout is not None or arguments.json is not None:
        raise ConfigurationError("--layout and --json belong to `stragglers explain TRACE`.")
    for number, path in enumerate(arguments.files):
        if len(arguments.files) > 1:
            print(f"\n{path}:" if number else f"{path}:")
        events = _read(path)
        print(summarise(events) if events else f"{path} holds no events.")
    return 0


def _read(path: Path) -> Sequence[Event]:
    """Return the events of a log, or those that the detector finds in a recording."""
    if is_event_log(path):
        return read_events(path)
    found = read_times(path)
    print(f"Found {found.source}.")
    return find_changes(found.times_s)


def summarise(events: Sequence[Event]) -> str:
    """Return a line about the run, and a table of all that happened."""
    iterations = [event for event in events if isinstance(event, IterationEvent)]
    lines = []
    if iterations:
        median_s = statistics.median(event.iteration_s for event in iterations)
        steps = f"steps {iterations[0].step} to {iterations[-1].step}"
        lines.append(f"{len(iterations)} iterations, {steps}, median {median_s:.3g} s")
    rows = [_row(event) for event in events if not isinstance(event, IterationEvent)]
    if rows:
        lines.append(format_table(("step", "event", "details"), rows))
    else:
        lines.append("No change was found.")
    return "\n".join(lines)


def _row(event: Event) -> tuple[str, str, str]:
    assert not isinstance(event, IterationEvent)
    kind = "found" if isinstance(event, Finding) else event.kind.value
    return str(event.step), kind, str(event)


def _explain(path: Path, layout_path: Path | None, json_path: Path | None) -> int:
    """Print why the run of an operation trace was slow; return the exit code."""
    trace = read_operations(path)
    if layout_path is None and (path / "layout.yaml").is_file():
        layout_path = path / "layout.yaml"
    layout = Layout()
    if layout_path is not None:
        layout = load_file(layout_path, "layout", ConfigurationError, _parse_layout)
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


def _parse_layout(text: str) -> Layout:
    return Layout.from_dict(parse_yaml(text, "layout", ConfigurationError))
