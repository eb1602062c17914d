"""`lightning-hetero stragglers FILE...`: what slowed a run, and what was done.

Reads the event log of a run with this package's callbacks, or recordings of any job, one file per
rank: `straggler.any_job` says which. Prints a table of changes, findings and actions; `report`
draws them.

`lightning-hetero stragglers explain` is a command of its own, see `explain`.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from lightning_hetero.core.texts import format_table
from lightning_hetero.straggler import (
    Event,
    Finding,
    IterationEvent,
    find_changes,
    read_events,
    read_times,
)
from lightning_hetero.straggler.any_job import is_event_log


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
        "`lightning-hetero stragglers explain TRACE` says why a run is slow, from a trace of its "
        "operations: see `lightning-hetero stragglers explain --help`."
    )


def run_stragglers(arguments: argparse.Namespace) -> int:
    """Print the table; return the exit code."""
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
