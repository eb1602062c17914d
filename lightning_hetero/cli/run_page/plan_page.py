"""Draw a plan: as a picture by matplotlib, or as an HTML page that shows each bar's numbers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_hetero.cli.run_page import render_page
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.simulator import (
    TERM_NAMES,
    CostModel,
    Event,
    Simulation,
    StageFacts,
    memory_terms,
    plot_timeline,
)

WIDTH = 900.0
_MOST_LANES, _MOST_BARS = 64, 20_000
_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward of the input",
    "W": "backward of the weights",
    "SF": "activation to the next stage",
    "SB": "gradient to the stage before",
}
_GIB = 2**30


Bars = list[dict[str, Any]]
"""The bars of a lane (kind, x, width), each with the text shown under the pointer (words)."""


def draw_plan(path: str | Path, plan: ParallelPlan, cost: CostModel, found: Simulation) -> None:
    """Draw a simulated iteration into a file; the file's suffix decides the format.

    Args:
        path: An `.html` page, or a picture that matplotlib writes.
        plan: The plan that was simulated.
        cost: The cost model of the simulation.
        found: Its simulation, with events recorded.

    Raises:
        ConfigurationError: The file can't be written, or a package for it is missing.
    """
    if Path(path).suffix.lower() != ".html":
        plot_timeline(path, plan, found)
        return
    lanes = list(_lanes(plan, found))
    page = render_page(
        "plan.html.j2",
        lanes=lanes,
        left_out=sum(p.num_stages for p in plan.pipelines) - len(lanes),
        seconds=f"{found.iteration_time_s:.4g} s",
        bottleneck=found.bottleneck,
        terms=TERM_NAMES,
        model=cost.model.name,
    )
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"Can't write {path}: {error.strerror}.") from error


def _lanes(plan: ParallelPlan, found: Simulation) -> Iterator[dict[str, Any]]:
    places = [(p, s) for p, s, _ in plan.iter_stages()][:_MOST_LANES]
    events: dict[tuple[int, int], list[Event]] = {place: [] for place in places}
    for event in found.events[:_MOST_BARS]:
        place = event.pipeline_index, event.stage_index
        if place in events and event.end_s > event.start_s:
            events[place].append(event)
    most = max(stage.device_bytes or 1.0 for row in found.stages for stage in row)
    for (p, s), own in events.items():
        stage, known = plan.pipelines[p].stages[s], found.stages[p][s]
        layers = stage.layers
        yield {
            "label": f"pipeline {p} stage {s}: {stage.tp_degree} × {known.device}, "
            f"layers {layers.start} to {layers.stop - 1}",
            "bars": [_bar(event, found.iteration_time_s) for event in own],
            "memory": _memory(known, most),
            # Where the memory that a plan may fill ends.
            "usable_x": (known.usable_bytes or 0.0) / most * WIDTH,
        }


def _bar(event: Event, total_s: float) -> dict[str, Any]:
    name = _NAMES.get(event.kind, event.kind)
    which = f" of micro-batch {event.microbatch_index}" if event.microbatch_index >= 0 else ""
    seconds = event.end_s - event.start_s
    return {
        "kind": event.kind,
        "x": event.start_s / total_s * WIDTH,
        "width": seconds / total_s * WIDTH,
        "words": f"{name}{which}: {seconds:.4g} s, from {event.start_s:.4g} to {event.end_s:.4g} s",
    }


def _memory(known: StageFacts, most: float) -> Bars:
    left, bars = 0.0, []
    for name, num_bytes in memory_terms(known).items():
        width = num_bytes / most * WIDTH
        whole = (known.device_bytes or 0.0) / _GIB
        words = f"{TERM_NAMES[name]}: {num_bytes / _GIB:.3g} of {whole:.3g} GiB"
        if name == "reserved":
            left = (known.usable_bytes or 0.0) / most * WIDTH
        if width > 0:
            bars.append({"kind": name, "x": left, "width": width, "words": words})
        left += width
    return bars
