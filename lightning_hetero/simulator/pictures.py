"""Draw the timeline of a simulation.

The picture has one lane per stage, forwards and backwards numbered, and messages between lanes.
Beside it, a bar per stage shows what fills its devices, stacked by term. Pipelines that differ only
in ranks are drawn once.
matplotlib is optional; without it a plot is refused with the command that installs it.
"""

import math
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
from lightning_hetero.simulator.simulate import Event, Simulation


class _Kind(NamedTuple):
    """How events of one kind are shown."""

    colour: str | None = None
    """Of its bars; None if it isn't drawn."""
    label: str = ""
    """In the legend."""
    text_colour: str | None = None
    """Of the micro-batches' numbers; None writes none."""


# Colour-blind safe (Okabe-Ito); forward and backward differ in lightness too.
_KINDS = {
    "F": _Kind("#56B4E9", "forward", "black"),
    "B": _Kind("#0072B2", "backward", "white"),
    "I": _Kind("#0072B2", "gradient of the input", "white"),
    "W": _Kind("#009E73", "gradients of weights", "white"),
    "SF": _Kind(),
    "SB": _Kind(),
    "pull": _Kind("#F0E442", "pull weights (exposed)"),
    "push": _Kind("#E69F00", "push gradients, wait for peers"),
    "step": _Kind("#CC79A7", "optimizer step"),
}
_MESSAGES = {"SF": ("#666666", "activations sent"), "SB": ("#D55E00", "gradients sent")}
"""Colour and label of messages under way."""
_LANE_HEIGHT = 0.8
_HEAD_HEIGHT = 0.75
_WIDTH_INCHES = 12.0
_MAX_LANES = 64
_LEGEND_COLUMNS = 5


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
    _check_events(simulation)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "A picture needs matplotlib, which isn't installed. Run: "
            "pip install 'lightning-hetero[plot]'."
        ) from error
    counts = _num_microbatches(plan, simulation)
    groups = alike_pipelines(plan, simulation.stages, counts)
    lanes = _lanes(plan, [members[0] for members in groups])
    height = max(lanes.values()) + 1
    figure = Figure(figsize=(_WIDTH_INCHES * 4 / 3, 1.9 + 0.36 * height), layout="constrained")
    axes, memory_axes = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    _draw_bars(axes, lanes, simulation)
    _draw_messages(axes, lanes, simulation)
    axes.set_yticks([position + _LANE_HEIGHT / 2 for position in lanes.values()])
    axes.set_yticklabels([_stage_label(plan, simulation, *place) for place in lanes])
    axes.set_ylim(height, 0)
    axes.set_xlim(0, simulation.iteration_time_s)
    for members in groups:
        if (members[0], 0) in lanes:
            _head(axes, lanes[members[0], 0], members, counts[members[0]])
    _finish_axes(axes, lanes, simulation)
    draw_memory(memory_axes, lanes, simulation.stages)
    num_left_out = sum(plan.pipelines[m[0]].num_stages for m in groups) - len(lanes)
    if num_left_out:
        axes.text(0, height, f"{num_left_out} more stages are not drawn", va="top", fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise ConfigurationError(f"Can't draw {path}: {error}") from error
    except OSError as error:
        raise ConfigurationError(f"Can't write {path}: {error.strerror}.") from error


def _check_events(simulation: Simulation) -> None:
    if not simulation.events:
        raise ConfigurationError(
            "The simulation recorded no events. Call simulate(..., record_events=True)."
        )


def _num_microbatches(plan: ParallelPlan, simulation: Simulation) -> list[int]:
    counts = [0] * plan.num_pipelines
    for event in simulation.events:
        counts[event.pipeline_index] += event.kind == "F" and event.stage_index == 0
    return counts


def _lanes(plan: ParallelPlan, pipelines: Sequence[int]) -> dict[tuple[int, int], float]:
    """Return the upper edge of every stage's lane, at most the first `_MAX_LANES` of them."""
    lanes: dict[tuple[int, int], float] = {}
    position = 0.0
    for pipeline in pipelines:
        position += _HEAD_HEIGHT
        for stage in range(plan.pipelines[pipeline].num_stages):
            if len(lanes) < _MAX_LANES:
                lanes[pipeline, stage] = position
            position += 1
    return lanes


def _stage_label(plan: ParallelPlan, simulation: Simulation, pipeline: int, stage: int) -> str:
    found, known = plan.pipelines[pipeline].stages[stage], simulation.stages[pipeline][stage]
    return (
        f"stage {stage}: {found.tp_degree} × {known.device}, "
        f"layers {found.layers.start}-{found.layers.stop - 1}"
    )


def _head(axes: Any, top: float, members: Sequence[int], num_microbatches: int) -> None:
    """Write the pipelines of a group above its first lane."""
    name = "pipeline" if len(members) == 1 else "pipelines"
    axes.annotate(
        f"{name} {list_indices(members)}, {num_microbatches} micro-batches"
        f"{' each' if len(members) > 1 else ''}",
        xy=(0, top),
        xytext=(0, 2),
        textcoords="offset points",
        va="bottom",
        fontsize=8,
        fontweight="bold",
    )


def _draw_bars(axes: Any, lanes: dict[tuple[int, int], float], simulation: Simulation) -> None:
    end = simulation.iteration_time_s
    for kind, style in _KINDS.items():
        events = [e for e in simulation.events if e.kind == kind]
        shown = [e for e in events if (e.pipeline_index, e.stage_index) in lanes]
        if not shown or style.colour is None:
            continue
        axes.barh(
            [lanes[e.pipeline_index, e.stage_index] for e in shown],
            [e.end_s - e.start_s for e in shown],
            left=[e.start_s for e in shown],
            height=_LANE_HEIGHT,
            align="edge",
            color=style.colour,
            edgecolor="white",
            linewidth=_edge_width(shown, end),
            label=style.label,
        )
        if style.text_colour is not None:
            for place in lanes:
                own = [e for e in shown if (e.pipeline_index, e.stage_index) == place]
                _number(axes, lanes[place] + _LANE_HEIGHT / 2, own, end)


def _draw_messages(axes: Any, lanes: dict[tuple[int, int], float], simulation: Simulation) -> None:
    """Draw messages between a stage's lane and the next one's: activations above their gradients.

    A message is as long as it is under way, so lines above each other are messages in flight.
    """
    for kind, (colour, label) in _MESSAGES.items():
        is_back = kind == "SB"
        drawn = [
            (lanes[e.pipeline_index, e.stage_index - is_back], e)
            for e in simulation.events
            if e.kind == kind and (e.pipeline_index, e.stage_index - is_back) in lanes
        ]
        if drawn:
            height = (1 - _LANE_HEIGHT) / 2
            axes.barh(
                [top + _LANE_HEIGHT + is_back * height for top, _ in drawn],
                [e.end_s - e.start_s for _, e in drawn],
                left=[e.start_s for _, e in drawn],
                height=0.8 * height,
                align="edge",
                color=colour,
                edgecolor="white",
                linewidth=_edge_width([e for _, e in drawn], simulation.iteration_time_s),
                label=label,
            )


def _edge_width(events: Sequence[Event], end_s: float) -> float:
    """Return the width of the white edge between bars in points, less if bars are short."""
    share = sum(e.end_s - e.start_s for e in events) / len(events) / end_s
    return min(0.4, share * _WIDTH_INCHES * 72 / 10)


def _number(axes: Any, middle: float, events: Sequence[Event], end_s: float) -> None:
    """Write the micro-batches' indices into a lane's bars if all fit: 0.09 inches a digit."""
    inches_per_s = _WIDTH_INCHES * 0.75 / end_s
    narrowest = min(((e.end_s - e.start_s) * inches_per_s for e in events), default=0.0)
    if narrowest < 0.09 * len(str(len(events) - 1)) + 0.04:
        return
    for event in events:
        axes.text(
            (event.start_s + event.end_s) / 2,
            middle,
            str(event.microbatch_index),
            ha="center",
            va="center",
            fontsize=7,
            color=_KINDS[event.kind].text_colour,
        )


def _finish_axes(axes: Any, lanes: dict[tuple[int, int], float], simulation: Simulation) -> None:
    for place, position in lanes.items():
        axes.text(
            1.005,
            position + _LANE_HEIGHT / 2,
            f"{simulation.stages[place[0]][place[1]].busy:.0%}",
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=8,
        )
    axes.text(1.005, 1.005, "busy", transform=axes.transAxes, va="bottom", fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_title(
        f"One iteration: {simulation.iteration_time_s:.4g} s; limited by {simulation.bottleneck}",
        fontsize=10,
        loc="left",
        pad=8 + 14 * math.ceil(len(axes.containers) / _LEGEND_COLUMNS),
    )
    columns = min(_LEGEND_COLUMNS, len(axes.containers))
    _tidy(axes, "seconds", num_columns=columns, fontsize=8, handlelength=1.2)


def _tidy(axes: Any, unit: str, *, num_columns: int, **legend: float) -> None:
    """Leave out what says nothing, name the unit, and put the legend above."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel(unit, fontsize=9)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=num_columns,
        frameon=False,
        borderaxespad=0.1,
        **legend,
    )


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


def draw_memory(
    axes: Any,
    lanes: Mapping[tuple[int, int], float],
    facts: Sequence[Sequence[StageFacts]],
) -> None:
    """Draw a bar of memory terms beside each lane, and a black edge at its device's memory.

    Args:
        axes: Where to draw; its lanes are the timeline's.
        lanes: Upper edge of the lane of each (pipeline, stage) that is drawn.
        facts: [pipeline][stage] facts.
    """
    unit, unit_bytes = memory_unit(facts)
    known = {place: facts[place[0]][place[1]] for place in lanes}
    terms = {place: memory_terms(stage) for place, stage in known.items()}
    left = dict.fromkeys(lanes, 0.0)
    for name, label in TERM_NAMES.items():
        widths = {place: terms[place][name] / unit_bytes for place in lanes}
        if not any(widths.values()):
            continue
        axes.barh(
            list(lanes.values()),
            list(widths.values()),
            left=list(left.values()),
            height=_LANE_HEIGHT,
            align="edge",
            color=_TERM_COLOURS[name],
            edgecolor="white",
            linewidth=0.3,
            label=label,
        )
        left = {place: left[place] + widths[place] for place in lanes}
    for place, top in lanes.items():
        limit = (known[place].device_bytes or 0.0) / unit_bytes
        axes.plot([limit, limit], [top, top + _LANE_HEIGHT], color="black", linewidth=1.5)
    axes.set_xlim(0, None)
    axes.tick_params(axis="y", labelleft=False)
    style = {"fontsize": 7, "handlelength": 1.0, "columnspacing": 0.8}
    _tidy(axes, f"{unit} of a device", num_columns=2, **style)
