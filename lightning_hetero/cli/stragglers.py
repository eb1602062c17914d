"""`lightning-hetero stragglers EVENTS [--plot FILE]`: what slowed a run, and what was done.

Reads the event log of a run (JSON lines). Without `--plot` it prints a table of changes, findings
and actions; with it, it also draws iteration time, change points and actions over time.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.table import format_table
from lightning_hetero.straggler import (
    ActionEvent,
    ChangeEvent,
    ChangeKind,
    DecisionKind,
    Event,
    FindingEvent,
    IterationEvent,
    read_events,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["add_parser", "plot_events", "run_stragglers", "summarise"]

_COLOURS = {
    ChangeKind.SLOWDOWN: "#c0392b",
    ChangeKind.RECOVERY: "#1e8449",
    ChangeKind.IMPROVEMENT: "#2471a3",
}


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to `lightning-hetero`."""
    parser = subparsers.add_parser(
        "stragglers",
        help="replay and explain a log of iteration times",
        description="Show change points, causes and mitigations of a run.",
    )
    parser.add_argument("events", metavar="EVENTS", type=Path, help="event log, JSON lines")
    parser.add_argument(
        "--plot", metavar="FILE", type=Path, help="also draw the run (.svg, .png or .pdf)"
    )


def run_stragglers(arguments: argparse.Namespace) -> int:
    """Print the table, draw the picture if asked for; return the exit code."""
    events = read_events(arguments.events)
    if not events:
        print(f"{arguments.events} holds no events.")
        return 0
    print(summarise(events))
    if arguments.plot is not None:
        plot_events(events, arguments.plot)
        print(f"Drawn to {arguments.plot}.")
    return 0


def summarise(events: Sequence[Event]) -> str:
    """Return the run in one line and a table of all that happened."""
    iterations = [event for event in events if isinstance(event, IterationEvent)]
    lines = []
    if iterations:
        median_s = statistics.median(event.iteration_s for event in iterations)
        first, last = iterations[0].step, iterations[-1].step
        lines.append(
            f"{len(iterations)} iterations, steps {first} to {last}, median {median_s:.3g} s"
        )
    rows = [_row(event) for event in events if not isinstance(event, IterationEvent)]
    if rows:
        lines.append(format_table(("step", "event", "what", "details"), rows))
    else:
        lines.append("No change was found.")
    return "\n".join(lines)


def _row(event: ChangeEvent | FindingEvent | ActionEvent) -> tuple[str, str, str, str]:
    step = str(event.step)
    if isinstance(event, ChangeEvent):
        details = (
            f"{event.before:.3g} → {event.after:.3g} ({event.ratio:.2f}×) since step "
            f"{event.onset_step}, confidence {event.confidence:.2f}"
        )
        return step, event.kind.value, event.where, details
    if isinstance(event, FindingEvent):
        return step, "found", event.kind.value, str(event.finding)
    details = event.effect or event.reason
    if event.before_s is not None and event.after_s is not None:
        details += f"; iteration {event.before_s:.2f} s → {event.after_s:.2f} s"
    name = f"{event.kind.value} (dry run)" if event.dry_run else event.kind.value
    return step, name, event.mitigation.value, details


def plot_events(events: Sequence[Event], path: Path) -> None:
    """Draw iteration time, change points and actions over steps into a file.

    Raises:
        ConfigurationError: matplotlib is missing, or can't write such a file.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "Drawing needs matplotlib. Install it with `pip install lightning-hetero[plot]`."
        ) from error
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.add_subplot()
    _draw_iterations(axes, [event for event in events if isinstance(event, IterationEvent)])
    _draw_changes(axes, [event for event in events if isinstance(event, ChangeEvent)])
    _draw_actions(axes, [event for event in events if isinstance(event, ActionEvent)])
    axes.set_xlabel("step")
    axes.set_ylabel("iteration time (s)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    figure.legend(loc="outside lower center", ncols=6, frameon=False)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"Can't write {path}: {error}") from error


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
        # One stalled iteration must not press the rest of the run flat.
        ordered = sorted(times_s)
        top = ordered[int(0.995 * (len(ordered) - 1))]
        axes.set_ylim(0.0, 1.35 * top)


def _draw_changes(axes: "Axes", events: Sequence[ChangeEvent]) -> None:
    labelled: set[ChangeKind] = set()
    for event in events:
        label = None if event.kind in labelled else event.kind.value
        labelled.add(event.kind)
        axes.axvline(event.onset_step, color=_COLOURS[event.kind], linewidth=1.3, label=label)
        axes.axvspan(event.onset_step, event.step, color=_COLOURS[event.kind], alpha=0.15, lw=0)


def _draw_actions(axes: "Axes", events: Sequence[ActionEvent]) -> None:
    shown = [event for event in events if event.kind is not DecisionKind.KEEP]
    for index, event in enumerate(shown):
        undone = event.kind is DecisionKind.UNDO
        text = f"{event.mitigation.value} {'undone' if undone else 'applied'}"
        if event.dry_run:
            text += " (dry run)"
        axes.axvline(event.step, color="#b9770e", linestyle="--", linewidth=1.1)
        axes.annotate(
            text,
            xy=(event.step, 0.97 - 0.07 * (index % 3)),
            xycoords=axes.get_xaxis_transform(),
            xytext=(4, 0),
            textcoords="offset points",
            va="top",
            fontsize=8,
            color="#b9770e",
        )
    if shown:
        axes.plot([], [], color="#b9770e", linestyle="--", label="mitigation")
