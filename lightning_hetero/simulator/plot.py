"""Draw the timeline of a simulation: one lane per stage, forwards and backwards numbered.

matplotlib is optional; without it a plot is refused with the command that installs it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.simulator.simulate import Event, Simulation

__all__ = ["plot_timeline"]

# Colour-blind safe (Okabe-Ito); forward and backward differ in lightness too.
_COLOURS = {
    "F": "#56B4E9",
    "B": "#0072B2",
    "pull": "#F0E442",
    "push": "#E69F00",
    "step": "#CC79A7",
}
_LABELS = {
    "F": "forward",
    "B": "backward",
    "pull": "pull weights (exposed)",
    "push": "push gradients, wait for peers",
    "step": "optimizer step",
}
_TEXT_COLOURS = {"F": "black", "B": "white"}
_LANE_HEIGHT = 0.8
_GAP_BETWEEN_PIPELINES = 0.6
_WIDTH_INCHES = 12.0
_MAX_LANES = 64


def plot_timeline(
    path: str | Path,
    plan: ParallelPlan,
    simulation: Simulation,
    *,
    stage_labels: Sequence[Sequence[str]] | None = None,
) -> None:
    """Draw the timeline into a file; its suffix (.svg, .png, .pdf) says the format.

    Args:
        path: The file to write.
        plan: The plan that was simulated.
        simulation: Its simulation, with events recorded.
        stage_labels: [pipeline][stage] text left of the lanes; ranks and layers if None.

    Raises:
        ConfigurationError: matplotlib is missing, no events were recorded, or the suffix names no
            format that matplotlib writes.
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
    lanes = _lanes(plan)
    height = max(position for position in lanes.values()) + 1
    figure = Figure(figsize=(_WIDTH_INCHES, 1.3 + 0.36 * height), layout="constrained")
    axes: Any = figure.subplots()
    _draw_bars(axes, lanes, simulation)
    labels = stage_labels or _default_labels(plan)
    axes.set_yticks([position + _LANE_HEIGHT / 2 for position in lanes.values()])
    axes.set_yticklabels([labels[pipeline][stage] for pipeline, stage in lanes])
    axes.set_ylim(height, -0.2)
    axes.set_xlim(0, simulation.iteration_time_s)
    _finish_axes(axes, lanes, simulation)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise ConfigurationError(f"Can't draw {path}: {error}") from error
    except OSError as error:
        raise ConfigurationError(f"Can't write {path}: {error.strerror}.") from error


def _lanes(plan: ParallelPlan) -> dict[tuple[int, int], float]:
    """Return the upper edge of every stage's lane, at most the first `_MAX_LANES` of them."""
    places = [(pipeline, stage) for pipeline, stage, _ in plan.iter_stages()][:_MAX_LANES]
    return {place: index + _GAP_BETWEEN_PIPELINES * place[0] for index, place in enumerate(places)}


def _draw_bars(axes: Any, lanes: dict[tuple[int, int], float], simulation: Simulation) -> None:
    end = simulation.iteration_time_s
    for kind, colour in _COLOURS.items():
        events = [e for e in simulation.events if e.kind == kind]
        shown = [e for e in events if (e.pipeline_index, e.stage_index) in lanes]
        if not shown:
            continue
        axes.barh(
            [lanes[e.pipeline_index, e.stage_index] for e in shown],
            [e.end_s - e.start_s for e in shown],
            left=[e.start_s for e in shown],
            height=_LANE_HEIGHT,
            align="edge",
            color=colour,
            edgecolor="white",
            linewidth=0.4,
            label=_LABELS[kind],
        )
        if kind in _TEXT_COLOURS:
            for event in shown:
                _number(axes, lanes, event, end)


def _number(axes: Any, lanes: dict[tuple[int, int], float], event: Event, end_s: float) -> None:
    """Write the micro-batch's index into its bar if it fits: about 0.08 inches a digit."""
    text = str(event.microbatch_index)
    inches = (event.end_s - event.start_s) / end_s * _WIDTH_INCHES * 0.85
    if inches < 0.09 * len(text) + 0.04:
        return
    axes.text(
        (event.start_s + event.end_s) / 2,
        lanes[event.pipeline_index, event.stage_index] + _LANE_HEIGHT / 2,
        text,
        ha="center",
        va="center",
        fontsize=7,
        color=_TEXT_COLOURS[event.kind],
        clip_on=True,
    )


def _finish_axes(axes: Any, lanes: dict[tuple[int, int], float], simulation: Simulation) -> None:
    for place, position in lanes.items():
        axes.text(
            1.005,
            position + _LANE_HEIGHT / 2,
            f"{simulation.stage_busy[place[0]][place[1]]:.0%}",
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=8,
        )
    axes.text(1.005, 1.005, "busy", transform=axes.transAxes, va="bottom", fontsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("seconds", fontsize=9)
    axes.set_title(
        f"One iteration: {simulation.iteration_time_s:.4g} s; limited by {simulation.bottleneck}",
        fontsize=10,
        loc="left",
        pad=22,
    )
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=len(_COLOURS),
        frameon=False,
        fontsize=8,
        borderaxespad=0.1,
        handlelength=1.2,
    )


def _default_labels(plan: ParallelPlan) -> list[list[str]]:
    return [
        [
            f"pipeline {index} stage {s}: ranks {','.join(map(str, stage.ranks))}, "
            f"layers {stage.layers.start}-{stage.layers.stop - 1}"
            for s, stage in enumerate(pipeline.stages)
        ]
        for index, pipeline in enumerate(plan.pipelines)
    ]
