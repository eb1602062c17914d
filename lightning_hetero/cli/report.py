"""`lightning-hetero report FOLDER [--output run.html]`: write one page about a run."""

import argparse
import statistics
from pathlib import Path

from lightning_hetero.cli.run_page import render_page
from lightning_hetero.cli.run_page.figures import charts, lanes, memory_rows, plan_rows
from lightning_hetero.cli.run_page.story import Story, read_story
from lightning_hetero.core.errors import ConfigurationError

__all__ = ["add_arguments", "render", "run_report"]

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
    page = render(read_story(arguments.folder))
    try:
        arguments.output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"Can't write {arguments.output}: {error}") from error
    print(f"Written to {arguments.output}.")
    return 0


def render(story: Story) -> str:
    """Return the page as HTML.

    Raises:
        ConfigurationError: Jinja2 isn't installed.
    """
    plans, memory = [], []
    for step, plan in story.plans[-_MOST_PLANS:]:
        try:
            plans.append((step, plan_rows(plan, story.nodes)))
            memory = memory_rows(story, plan)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            story.verdicts.append(f"The plan of step {step} can't be drawn: {error!r}")
    span_s = (story.last_s or 0.0) - (story.first_s or 0.0)
    return render_page(
        "page.html.j2",
        story=story,
        state=_STATES[story.state],
        numbers=_numbers(story),
        charts=charts(story),
        lanes=lanes(story),
        plans=plans,
        memory=memory,
        duration=f"{span_s:.0f} s" if span_s < 7200 else f"{span_s / 3600:.1f} h",
        events=story.happenings[:_MOST_EVENTS],
        left_out=max(0, len(story.happenings) - _MOST_EVENTS),
    )


def _numbers(story: Story) -> list[tuple[str, str]]:
    """Return the few numbers at the top of the page."""
    per_second = story.scalars.get("run/tokens_per_s")
    found = {
        "last step": f"{max(story.times_s):,}" if story.times_s else "",
        "median iteration": _median(story.times_s),
        "median predicted": _median(story.predicted_s),
        "tokens per second": f"{per_second[max(per_second)]:,.0f}" if per_second else "",
        "ranks": str(len(story.nodes) or ""),
        "nodes": ", ".join(sorted(set(story.nodes))),
    }
    return [(name, text) for name, text in found.items() if text]


def _median(times_s: dict[int, float]) -> str:
    return f"{statistics.median(times_s.values()):.3g} s" if times_s else ""
