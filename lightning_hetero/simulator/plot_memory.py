"""Draw what fills each stage's devices: a bar per stage, stacked by term, against the device."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_hetero.simulator.report import TERM_NAMES, StageFacts, memory_terms, memory_unit

__all__ = ["draw_memory"]

# Colour-blind safe (Paul Tol's muted); states in blues and greens, what passes in warm colours.
_COLOURS = {
    "weights": "#332288",
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
    lane_height: float,
) -> None:
    """Draw a bar beside each lane of the timeline, and a black edge where its device ends.

    Args:
        axes: Where to draw; its lanes are the timeline's.
        lanes: Upper edge of the lane of each (pipeline, stage) that is drawn.
        facts: [pipeline][stage] what is known of it.
        lane_height: Height of a bar.
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
            height=lane_height,
            align="edge",
            color=_COLOURS[name],
            edgecolor="white",
            linewidth=0.3,
            label=label,
        )
        left = {place: left[place] + widths[place] for place in lanes}
    for place, top in lanes.items():
        limit = (known[place].device_bytes or 0.0) / unit_bytes
        axes.plot([limit, limit], [top, top + lane_height], color="black", linewidth=1.5)
    axes.set_xlim(0, None)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0, labelleft=False)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel(f"{unit} of a device", fontsize=9)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=2,
        frameon=False,
        fontsize=7,
        borderaxespad=0.1,
        handlelength=1.0,
        columnspacing=0.8,
    )
