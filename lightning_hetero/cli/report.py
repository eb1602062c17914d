"""`lightning-hetero report FOLDER [--output run.html]`: write one page about a run."""

import argparse
import statistics
from pathlib import Path

from lightning_hetero.cli.run_page import render_page
from lightning_hetero.cli.run_page.figures import charts, lanes, memory_rows, plan_rows
from lightning_hetero.cli.run_page.history import RunHistory, read_history
from lightning_hetero.core.errors import ConfigurationError

_MOST_EVENTS, _MOST_PLANS = 1000, 20
_STATES = {
    "running": "Still running, or ended less than ten minutes ago without recording its end.",
    "silent": "Nothing was written for more than ten minutes, and no end: the run seems dead.",
    "failed": "Failed; the last event says why.",
    "ended": "Ended as planned.",
    "recorded": "Made from recordings of iteration times.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.description = (
        "Write one self-contained HTML page about a run, from what RunLog, StragglerMonitor, "
        "RunMetrics or lightning_hetero.straggler.record() wrote to a folder, and from operation "
        "traces there. It also works while the run goes on."
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the run's folder")
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        default=Path("run.html"),
        help="page to write (default: run.html)",
    )


def run_report(arguments: argparse.Namespace) -> int:
    """Write the page; return the exit code."""
    page = render(read_history(arguments.folder))
    try:
        arguments.output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"Can't write {arguments.output}: {error}") from error
    print(f"Written to {arguments.output}.")
    return 0


def render(history: RunHistory) -> str:
    """Return the page as HTML.

    Raises:
        ConfigurationError: Jinja2 isn't installed.
    """
    plans, memory = [], []
    for step, plan in history.plans[-_MOST_PLANS:]:
        try:
            plans.append((step, plan_rows(plan, history.nodes)))
            memory = memory_rows(history, plan)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            history.verdicts.append(f"The plan of step {step} can't be drawn: {error!r}")
    span_s = (history.last_s or 0.0) - (history.first_s or 0.0)
    return render_page(
        "page.html.j2",
        history=history,
        state=_STATES[history.state],
        numbers=_numbers(history),
        charts=charts(history),
        lanes=lanes(history),
        plans=plans,
        memory=memory,
        duration=f"{span_s:.0f} s" if span_s < 7200 else f"{span_s / 3600:.1f} h",
        events=history.events[:_MOST_EVENTS],
        left_out=max(0, len(history.events) - _MOST_EVENTS),
    )


def _numbers(history: RunHistory) -> list[tuple[str, str]]:
    """Return the few numbers at the top of the page."""
    per_second = history.scalars.get("run/tokens_per_s")
    found = {
        "last step": f"{max(history.times_s):,}" if history.times_s else "",
        "median iteration": _median(history.times_s),
        "median predicted": _median(history.predicted_s),
        "tokens per second": f"{per_second[max(per_second)]:,.0f}" if per_second else "",
        "ranks": str(len(history.nodes) or ""),
        "nodes": ", ".join(sorted(set(history.nodes))),
    }
    return [(name, text) for name, text in found.items() if text]


def _median(times_s: dict[int, float]) -> str:
    return f"{statistics.median(times_s.values()):.3g} s" if times_s else ""
