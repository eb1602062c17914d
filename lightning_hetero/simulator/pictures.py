"""Draw the timeline of a simulation, and beside it a bar of memory for each stage.

Each stage has a lane: its actions, numbered by micro-batch, and below them the messages to the next
stage and back, as long as they are under way. Pipelines that differ only in ranks are drawn once.
matplotlib is optional; without it a plot is refused with the command that installs it.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.simulator.memory import StageFacts
from lightning_hetero.simulator.report import (
    TERM_NAMES,
    alike_pipelines,
    list_indices,
    memory_terms,
    memory_unit,
)
from lightning_hetero.simulator.simulate import Simulation

_LANE_HEIGHT = 0.8
_HEAD_HEIGHT = 0.75
_WIDTH_INCHES = 12.0
_DIGIT_INCHES = 0.09
"""Width of a digit of a micro-batch's number."""
_MAX_LANES = 64
_LEGEND_COLUMNS = 5


class _Kind(NamedTuple):
    """How events of one kind are shown."""

    colour: str
    label: str
    text_colour: str | None = None
    """Of the micro-batches' numbers; None writes none."""
    lane: int = 0
    """Its lane, counted from that of the event's stage."""
    top: float = 0.0
    height: float = _LANE_HEIGHT


# Colour-blind safe (Okabe-Ito); forward and backward differ in lightness too.
_KINDS = {
    "F": _Kind("#56B4E9", "forward", "black"),
    "B": _Kind("#0072B2", "backward", "white"),
    "I": _Kind("#0072B2", "gradient of the input", "white"),
    "W": _Kind("#009E73", "gradients of weights", "white"),
    "pull": _Kind("#F0E442", "pull weights (exposed)"),
    "push": _Kind("#E69F00", "push gradients, wait for peers"),
    "step": _Kind("#CC79A7", "optimizer step"),
    "SF": _Kind("#666666", "activations sent", top=_LANE_HEIGHT, height=0.08),
    "SB": _Kind("#D55E00", "gradients sent", lane=-1, top=_LANE_HEIGHT + 0.1, height=0.08),
}
# Colour-blind safe (Paul Tol's muted); states in blues and greens, micro-batches in warm colours.
_TERM_COLOURS = {
    "weights": "#332288",
    "frozen": "#117733",
    "gradients": "#88CCEE",
    "owned": "#44AA99",
    "activations": "#CC6677",
    "recomputed": "#882255",
    "head": "#DDCC77",
    "messages": "#AA4499",
    "exchange": "#999933",
    "reserved": "#DDDDDD",
}
_FIRST = ("F", 0)
"""Kind and stage of the events that a pipeline has one of for each micro-batch."""
_Lanes = Mapping[tuple[int, int], float]
"""Upper edge of the lane of each (pipeline, stage) that is drawn."""


def plot_timeline(path: str | Path, plan: ParallelPlan, simulation: Simulation) -> None:
    """Draw the timeline into a file; its suffix (.svg, .png, .pdf) says the format.

    Args:
        path: The file to write.
        plan: The plan that was simulated.
        simulation: Its simulation, with events recorded.

    Raises:
        ConfigurationError: matplotlib is missing, no events were recorded, the suffix names no
            format that matplotlib writes, or the file can't be written.
    """
    if not simulation.events:
        raise ConfigurationError(
            "The simulation recorded no events. Call simulate(..., record_events=True)."
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "A picture needs matplotlib, which isn't installed. Run: "
            "pip install 'lightning-hetero[plot]'."
        ) from error
    work = Counter(e.pipeline_index for e in simulation.events if (e.kind, e.stage_index) == _FIRST)
    counts = [work[index] for index in range(plan.num_pipelines)]
    heads: list[tuple[float, str]] = []
    lanes: dict[tuple[int, int], float] = {}
    height = 0.0
    for members in alike_pipelines(plan, simulation.stages, counts):
        first, each = members[0], " each" if len(members) > 1 else ""
        name = "pipelines" if each else "pipeline"
        text = f"{name} {list_indices(members)}, {counts[first]} micro-batches{each}"
        height += _HEAD_HEIGHT
        heads.append((height, text))
        for stage in range(plan.pipelines[first].num_stages):
            lanes[first, stage] = height
            height += 1
    drawn = dict(list(lanes.items())[:_MAX_LANES])
    height = max(drawn.values()) + 1
    figure = Figure(figsize=(_WIDTH_INCHES * 4 / 3, 1.9 + 0.36 * height), layout="constrained")
    axes, memory_axes = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    _draw_events(axes, drawn, simulation)
    _describe(axes, drawn, plan, simulation)
    axes.set_ylim(height, 0)
    bold = {"fontsize": 8, "fontweight": "bold"}
    for top, text in heads:
        if top < height:
            axes.annotate(text, (0, top), (0, 2), textcoords="offset points", **bold)
    if len(drawn) < len(lanes):
        text = f"{len(lanes) - len(drawn)} more stages are not drawn"
        axes.text(0, height, text, va="top", fontsize=8)
    draw_memory(memory_axes, drawn, simulation.stages)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise ConfigurationError(f"Can't draw {path}: {error}") from error
    except OSError as error:
        raise ConfigurationError(f"Can't write {path}: {error.strerror}.") from error


def _draw_events(axes: Any, lanes: _Lanes, simulation: Simulation) -> None:
    inches_per_s = _WIDTH_INCHES * 0.75 / simulation.iteration_time_s
    for name, kind in _KINDS.items():
        places = [
            (event, (event.pipeline_index, event.stage_index + kind.lane))
            for event in simulation.events
            if event.kind == name
        ]
        shown = [(event, lanes[place]) for event, place in places if place in lanes]
        if not shown:
            continue
        widths = [event.end_s - event.start_s for event, _ in shown]
        bars = axes.barh(
            [top + kind.top for _, top in shown],
            widths,
            left=[event.start_s for event, _ in shown],
            height=kind.height,
            align="edge",
            color=kind.colour,
            edgecolor="white",
            # Short bars have thin edges.
            linewidth=min(0.4, 10 * inches_per_s * sum(widths) / len(widths)),
            label=kind.label,
        )
        numbers = [str(event.microbatch_index) for event, _ in shown]
        digits = max(map(len, numbers)) + 0.5
        if kind.text_colour and min(widths) * inches_per_s > digits * _DIGIT_INCHES:
            style = {"fontsize": 7, "color": kind.text_colour}
            axes.bar_label(bars, numbers, label_type="center", **style)


def _describe(axes: Any, lanes: _Lanes, plan: ParallelPlan, simulation: Simulation) -> None:
    """Write what lanes are, how busy they are, and the title."""
    middles, names = [top + _LANE_HEIGHT / 2 for top in lanes.values()], []
    for (pipeline, index), middle in zip(lanes, middles, strict=True):
        stage, known = plan.pipelines[pipeline].stages[index], simulation.stages[pipeline][index]
        layers = f"layers {stage.layers.start}-{stage.layers.stop - 1}"
        names.append(f"stage {index}: {stage.tp_degree} × {known.device}, {layers}")
        place = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8}
        axes.text(1.005, middle, f"{known.busy:.0%}", **place)
    axes.text(1.005, 1.005, "busy", transform=axes.transAxes, va="bottom", fontsize=8)
    axes.set_yticks(middles, names, fontsize=8)
    axes.set_xlim(0, simulation.iteration_time_s)
    axes.set_title(
        f"One iteration: {simulation.iteration_time_s:.4g} s; limited by {simulation.bottleneck}",
        fontsize=10,
        loc="left",
        pad=8 + 14 * math.ceil(len(axes.containers) / _LEGEND_COLUMNS),
    )
    columns = min(_LEGEND_COLUMNS, len(axes.containers))
    _tidy(axes, "seconds", ncols=columns, fontsize=8, handlelength=1.2)


def draw_memory(axes: Any, lanes: _Lanes, facts: Sequence[Sequence[StageFacts]]) -> None:
    """Draw a bar of memory terms beside each lane, and a black edge at its device's memory.

    Args:
        axes: Where to draw; its lanes are the timeline's.
        lanes: Upper edges of lanes.
        facts: [pipeline][stage] facts.
    """
    unit, unit_bytes = memory_unit(facts)
    known = [facts[pipeline][stage] for pipeline, stage in lanes]
    terms, left = list(map(memory_terms, known)), [0.0] * len(known)
    for name, label in TERM_NAMES.items():
        widths = [row[name] / unit_bytes for row in terms]
        if any(widths):
            style = {"color": _TERM_COLOURS[name], "edgecolor": "white", "linewidth": 0.3}
            size = {"left": left, "height": _LANE_HEIGHT, "align": "edge"}
            axes.barh(list(lanes.values()), widths, label=label, **size, **style)
            left = [before + width for before, width in zip(left, widths, strict=True)]
    for stage, top in zip(known, lanes.values(), strict=True):
        limit = (stage.device_bytes or 0.0) / unit_bytes
        axes.plot([limit, limit], [top, top + _LANE_HEIGHT], color="black", linewidth=1.5)
    axes.set_xlim(0, None)
    axes.tick_params(axis="y", labelleft=False)
    legend = {"ncols": 2, "fontsize": 7, "handlelength": 1.0, "columnspacing": 0.8}
    _tidy(axes, f"{unit} of a device", **legend)


def _tidy(axes: Any, unit: str, **legend: float) -> None:
    """Leave out what says nothing, name the unit, and put the legend above."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel(unit, fontsize=9)
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "borderaxespad": 0.1}
    axes.legend(frameon=False, **place, **legend)
