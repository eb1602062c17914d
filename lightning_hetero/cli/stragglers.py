"""`lightning-hetero stragglers FILE... [--plot FILE]`: what slowed a run, and what was done.

Reads the event log of a run with this package's callbacks, or recordings of any job, one file per
rank: `straggler.any_job` says which. Prints a table of changes, findings, actions and generations
of ranks; `--plot` also draws these over time, together with the iteration times.

`lightning-hetero stragglers explain TRACE` reads an operation trace instead, and says why it is
slow.
"""

import argparse
import math
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lightning_hetero.cli.arguments import add_plot_argument, check_picture
from lightning_hetero.cli.explain import explain_trace
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.texts import format_table
from lightning_hetero.straggler import (
    ActionEvent,
    ChangeEvent,
    ChangeKind,
    DecisionKind,
    Event,
    FindingEvent,
    GenerationEvent,
    IterationEvent,
    find_changes,
    read_events,
    read_times,
)
from lightning_hetero.straggler.any_job import is_event_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["add_arguments", "plot_events", "run_stragglers", "summarise"]

_COLOURS = {
    ChangeKind.SLOWDOWN: "#c0392b",
    ChangeKind.RECOVERY: "#1e8449",
    ChangeKind.IMPROVEMENT: "#2471a3",
}
_ACTION, _RANKS = "#935116", "#7d3c98"
_LEFT_INCHES, _PLOT_INCHES, _RIGHT_INCHES = 0.7, 10.0, 0.2
_ROW_INCHES, _CHARACTER_INCHES = 0.2, 0.066
_MAX_ROWS, _MAX_CHARACTERS = 8, 72


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.description = (
        "Show change points, causes and mitigations of a run. A FILE is an event log of "
        "StragglerMonitor, or what was recorded of one rank of any job: a torch profiler's trace, "
        "an NCCL flight recorder's dump, what lightning_hetero.straggler.record() wrote (also its "
        "folder), or a list of iteration times in seconds."
    )
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+", help="a log or recording")
    add_plot_argument(parser, "the run (of several files: FILE-1, FILE-2, ...)")
    parser.epilog = (
        "`stragglers explain TRACE` says why a run is slow: TRACE is an operation trace (Parquet "
        "or JSON lines) with columns step, rank, dp_rank, stage, optype, start_ts, duration, mb_id."
    )
    explaining = parser.add_argument_group("for explain")
    explaining.add_argument(
        "--layout", metavar="META.yaml", type=Path, help="how the job was laid out"
    )
    explaining.add_argument("--json", metavar="FILE", type=Path, help="write the shares as JSON")


def run_stragglers(arguments: argparse.Namespace) -> int:
    """Print the table, and draw the picture if requested; return the exit code."""
    check_picture(arguments.plot)
    if str(arguments.files[0]) == "explain" and len(arguments.files) == 2:
        return explain_trace(arguments.files[1], arguments.layout, arguments.json)
    if arguments.layout is not None or arguments.json is not None:
        raise ConfigurationError("--layout and --json belong to `stragglers explain TRACE`.")
    files = [file for path in arguments.files for file in _files_at(path)]
    several = len(files) > 1
    for number, path in enumerate(files, start=1):
        if several:
            print(f"{path}:" if number == 1 else f"\n{path}:")
        events = _read(path)
        if not events:
            print(f"{path} holds no events.")
            continue
        print(summarise(events))
        if arguments.plot is not None:
            picture = Path(arguments.plot)
            if several:
                picture = picture.with_stem(f"{picture.stem}-{number}")
            plot_events(events, picture)
            print(f"Drawn to {picture}.")
    return 0


def _files_at(path: Path) -> list[Path]:
    """Return a file, or those of a folder that `record()` wrote."""
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.jsonl"))
    if not files:
        raise ConfigurationError(f"The folder {path} holds no .jsonl file. Give the files' names.")
    return files


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
    lines = [_headline(iterations)] if iterations else []
    rows = [_row(event) for event in events if not isinstance(event, IterationEvent)]
    if rows:
        lines.append(format_table(("step", "event", "what", "details"), rows))
    else:
        lines.append("No change was found.")
    return "\n".join(lines)


def _headline(iterations: Sequence[IterationEvent]) -> str:
    if not iterations:
        return "No iteration was logged"
    median_s = statistics.median(event.iteration_s for event in iterations)
    first, last = iterations[0].step, iterations[-1].step
    return f"{len(iterations)} iterations, steps {first} to {last}, median {median_s:.3g} s"


def _row(
    event: ChangeEvent | FindingEvent | ActionEvent | GenerationEvent,
) -> tuple[str, str, str, str]:
    step = str(event.step)
    if isinstance(event, GenerationEvent):
        return step, "generation", str(event.generation), str(event)
    if isinstance(event, ChangeEvent):
        details = (
            f"{event.ratio:.2f}× since step {event.onset_step}: {event.before:.3g} → "
            f"{event.after:.3g} {_unit_of(event.where)} (confidence {event.confidence:.2f})"
        )
        return step, event.kind.value, event.where, details
    if isinstance(event, FindingEvent):
        return step, "found", event.kind.value, str(event.finding)
    details = event.effect or event.reason
    if event.before_s is not None and event.after_s is not None:
        details += f"; iteration {event.before_s:.2f} s → {event.after_s:.2f} s"
    name = f"{event.kind.value} (dry run)" if event.dry_run else event.kind.value
    return step, name, event.mitigation.value, details


def _unit_of(where: str) -> str:
    if where == "the job":
        return "s an iteration"
    return "s for a unit of work" if where.startswith("rank") else "of what its work should take"


def plot_events(events: Sequence[Event], path: Path) -> None:
    """Draw the iteration time over steps, and above it changes, findings and actions.

    Raises:
        ConfigurationError: matplotlib can't write this kind of file.
    """
    from matplotlib.figure import Figure

    iterations = [event for event in events if isinstance(event, IterationEvent)]
    last = max(event.step for event in events)
    first = min(event.step for event in events)
    captions = _placed([c for c in map(_caption, events) if c is not None], first, last)
    num_rows = max((row for row, _ in captions), default=-1) + 1
    heights = [_ROW_INCHES * num_rows + 0.05, 3.4]
    width, height = _LEFT_INCHES + _PLOT_INCHES + _RIGHT_INCHES, sum(heights) + 1.3
    figure = Figure(figsize=(width, height))
    above, axes = figure.subplots(2, sharex=True, height_ratios=heights)
    figure.subplots_adjust(
        left=_LEFT_INCHES / width,
        right=1 - _RIGHT_INCHES / width,
        bottom=0.9 / height,
        top=1 - 0.4 / height,
        hspace=0.0,
    )
    _draw_captions(above, axes, captions, num_rows)
    _draw_iterations(axes, iterations)
    _draw_detection(axes, [event for event in events if isinstance(event, ChangeEvent)])
    axes.set_xlim(first, max(last, first + 1))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("iteration time (s)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    figure.suptitle(_headline(iterations), fontsize=10, x=0.01, ha="left", va="top", y=0.985)
    figure.legend(loc="lower center", ncols=6, frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"Can't write {path}: {error}") from error


class _Caption(NamedTuple):
    """A mark over a step, and a few words about it."""

    step: int
    text: str
    colour: str
    is_left: bool = False
    """Whether the words are left of the mark."""


def _caption(event: Event) -> _Caption | None:
    """Return the picture's caption for an event; None if it has none."""
    if isinstance(event, ChangeEvent):
        text = f"{event.kind.value} of {event.where}, {event.ratio:.2f}×"
        return _Caption(event.onset_step, text, _COLOURS[event.kind])
    if isinstance(event, GenerationEvent):
        return _Caption(event.step, f"generation {event.generation}: {event}", _RANKS)
    if isinstance(event, FindingEvent):
        return _Caption(event.step, f"found: {event.finding}", _COLOURS[ChangeKind.SLOWDOWN])
    if isinstance(event, ActionEvent) and event.kind is not DecisionKind.KEEP:
        done = "undone" if event.kind is DecisionKind.UNDO else "applied"
        dry_run = " (dry run)" if event.dry_run else ""
        effect = f": {event.effect}" if event.effect else ""
        return _Caption(event.step, f"{event.mitigation.value} {done}{dry_run}{effect}", _ACTION)
    return None


def _placed(captions: Sequence[_Caption], first: int, last: int) -> list[tuple[int, _Caption]]:
    """Return captions with rows in which they don't overlap; without words if no row is free."""
    inches_per_step = _PLOT_INCHES / max(1, last - first)
    free_from = [-math.inf] * _MAX_ROWS
    placed = []
    for caption in captions:
        text = textwrap.shorten(caption.text, _MAX_CHARACTERS, placeholder=" …")
        left = (caption.step - first) * inches_per_step
        width = 0.08 + _CHARACTER_INCHES * len(text)
        is_left = left + width > _PLOT_INCHES
        left -= width if is_left else 0.0
        row = next((row for row, free in enumerate(free_from) if free <= left), None)
        if row is None:
            placed.append((0, caption._replace(text="")))
        else:
            free_from[row] = left + width + 0.1
            placed.append((row, caption._replace(text=text, is_left=is_left)))
    return placed


def _draw_captions(
    above: "Axes", axes: "Axes", captions: Sequence[tuple[int, _Caption]], num_rows: int
) -> None:
    above.set_ylim(max(num_rows, 1), 0)  # A run in which nothing happened has no captions.
    above.axis("off")
    for row, (step, text, colour, is_left) in captions:
        axes.axvline(step, color=colour, linewidth=1.0, zorder=1)
        above.plot([step, step], [row + 0.5, num_rows], color=colour, linewidth=1.0, clip_on=False)
        above.annotate(
            text,
            xy=(step, row + 0.5),
            xytext=(-4 if is_left else 4, 0),
            textcoords="offset points",
            ha="right" if is_left else "left",
            va="center",
            fontsize=8,
            color=colour,
            annotation_clip=False,
            in_layout=False,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )


def _draw_iterations(axes: "Axes", events: Sequence[IterationEvent]) -> None:
    steps = [event.step for event in events]
    times_s = [event.iteration_s for event in events]
    axes.plot(steps, times_s, color="#34495e", linewidth=0.9, label="iteration time")
    predicted = [(e.step, e.predicted_s) for e in events if e.predicted_s is not None]
    if predicted:
        axes.plot(
            *zip(*predicted, strict=True), color="#e59866", ls=":", zorder=3, label="predicted"
        )
    if times_s:
        # A single stalled iteration mustn't flatten the rest of the curve.
        ordered = sorted(time_s for time_s in times_s if math.isfinite(time_s)) or [1.0]
        top = ordered[int(0.995 * (len(ordered) - 1))]
        axes.set_ylim(0.0, 1.1 * top if top > 0 else 1.0)


def _draw_detection(axes: "Axes", events: Sequence[ChangeEvent]) -> None:
    """Shade the steps between a change and its detection."""
    labelled: set[ChangeKind] = set()
    for event in events:
        label = None if event.kind in labelled else f"{event.kind.value}, until it was detected"
        labelled.add(event.kind)
        colour = _COLOURS[event.kind]
        axes.axvspan(event.onset_step, event.step, color=colour, alpha=0.2, lw=0, label=label)
