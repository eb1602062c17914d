"""Lay out a run's figures; the template draws them as SVG."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_hetero.cli.run_page.history import RunEvent, RunHistory

WIDTH, HEIGHT = 900.0, 220.0
_MOST_POINTS = 500
_MOST_MARKS = 300


Figure = dict[str, Any]
"""What the template draws: see `_chart` and `lanes`."""


def charts(history: RunHistory) -> list[Figure]:
    """Return the figures for whose curves the run's logs have numbers."""
    scalars = history.scalars
    per_second = scalars.get("run/tokens_per_s", {})
    ideal = {
        step: value * history.times_s[step] / history.predicted_s[step]
        for step, value in per_second.items()
        if history.times_s.get(step) and history.predicted_s.get(step)
    }
    iteration = scalars.get("run/iteration_s", {})

    def share(name: str) -> dict[int, float]:
        values = scalars.get(f"run/{name}", {}).items()
        return {step: value / iteration[step] for step, value in values if iteration.get(step)}

    causes = {
        "not computing": scalars.get("run/bubble_share", {}),
        "waiting for weights and gradients": share("exchange_wait_s"),
        "waiting for an assignment": share("planning_stall_s"),
    }
    tiers = {
        name.removeprefix("checkpoint/"): steps
        for name, steps in scalars.items()
        if name.startswith("checkpoint/")
    }
    wanted = (
        (
            "Seconds of an iteration",
            {"measured": history.times_s, "predicted": history.predicted_s},
        ),
        ("Tokens per second", {"measured": per_second, "as predicted": ideal}),
        ("Share of an iteration, by cause", causes),
        ("Newest step of which all parts are in a checkpoint tier", tiers),
    )
    known = [(title, {n: v for n, v in series.items() if v}) for title, series in wanted]
    return [_chart(title, series, history.events) for title, series in known if series]


def _chart(
    title: str, series: Mapping[str, Mapping[int, float]], events: Sequence[RunEvent]
) -> Figure:
    """Lay out a figure over steps: each line's medians, and a band from least to largest."""
    first = min(min(values) for values in series.values())
    last = max(max(values) for values in series.values())
    # A single stalled iteration mustn't flatten the rest of the curve.
    ordered = [sorted(values.values()) for values in series.values()]
    tops = [min(values[-1], 3 * values[int(0.995 * (len(values) - 1))]) for values in ordered]
    top = 1.1 * max(tops) or 1.0
    span = max(last - first, 1)

    def x_of(step: float) -> float:
        return (step - first) / span * WIDTH

    def y_of(value: float) -> float:
        return HEIGHT - min(max(value, 0.0), top) / top * HEIGHT

    lines = []
    for name, values in series.items():
        rows = _bins(values)
        path = " ".join(f"{x_of(step):.1f},{y_of(mid):.1f}" for step, _, mid, _ in rows)
        upper = [f"{x_of(step):.1f},{y_of(high):.1f}" for step, _, _, high in rows]
        lower = [f"{x_of(step):.1f},{y_of(low):.1f}" for step, low, _, _ in reversed(rows)]
        shown = rows[:: max(1, len(rows) // 40)]
        points = tuple(
            (x_of(step), y_of(mid), f"{name}, step {step}: {mid:.4g}") for step, _, mid, _ in shown
        )
        band = " ".join(upper + lower)
        # For the pointer and the keyboard.
        lines.append({"name": name, "path": path, "band": band, "points": points})
    marks = [
        (x_of(event.step), event.kind, f"step {event.step}: {event.kind}")
        for event in events
        if first <= event.step <= last and event.kind not in ("started", "validated")
    ]
    parts = (0.0, 0.25, 0.5, 0.75, 1.0)
    return {
        "title": title,
        "lines": lines,
        "ticks": [(y_of(top * part), _label(top * part)) for part in parts],
        "steps": [(x_of(first + span * part), f"{first + span * part:.0f}") for part in parts[::2]],
        "marks": marks[:_MOST_MARKS],
    }


def _label(value: float) -> str:
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"


def _bins(values: Mapping[int, float]) -> list[tuple[int, float, float, float]]:
    """Return (step, least, median, largest) of at most `_MOST_POINTS` runs of steps."""
    steps = sorted(values)
    size = math.ceil(len(steps) / _MOST_POINTS)
    rows = []
    for begin in range(0, len(steps), size):
        part = [values[step] for step in steps[begin : begin + size]]
        rows.append((steps[begin], min(part), statistics.median(part), max(part)))
    return rows


def lanes(history: RunHistory) -> list[Figure]:
    """Return the events that have a time, by kind, along the run's seconds."""
    if history.first_s is None or history.last_s is None:
        return []
    span = max(history.last_s - history.first_s, 1e-9)
    found: dict[str, list[tuple[float, str]]] = {}
    for event in history.events:
        if event.at_s is not None:
            x = (event.at_s - history.first_s) / span * WIDTH
            after_s = event.at_s - history.first_s
            words = f"{after_s:.1f} s, step {event.step}: {event.kind} {event.text}"
            found.setdefault(event.kind, []).append((x, words[:300]))
    return [{"kind": kind, "marks": marks[:_MOST_MARKS]} for kind, marks in found.items()]


def plan_rows(plan: Mapping[str, Any], nodes: Sequence[str]) -> list[list[Figure]]:
    """Return each pipeline's stages with their layers, ranks and share of the width."""
    rows = []
    for pipeline in plan.get("pipelines", ()):
        stages = pipeline.get("stages", ())
        counts = [max(1, stage["layers"][1] - stage["layers"][0]) for stage in stages]
        left, row = 0.0, []
        for stage, count in zip(stages, counts, strict=True):
            width = count / sum(counts) * WIDTH
            ranks = list(stage["ranks"])
            where = sorted({nodes[rank] for rank in ranks if rank < len(nodes)})
            low, high = stage["layers"]
            layers = f"layer {low}" if high - low == 1 else f"layers {low} to {high - 1}"
            who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            text = f"{who}: {layers}"
            at = f" on {', '.join(where)}" if where else ""
            row.append({"x": left, "width": width, "text": text, "words": text + at})
            left += width
        rows.append(row)
    return rows


def memory_rows(history: RunHistory, plan: Mapping[str, Any]) -> list[Figure]:
    """Return a bar for each stage of a plan: its fullest rank's bytes, in use and predicted."""
    most = max((max(pair) for pair in history.memory), default=0.0)
    name, unit = ("GiB", 2**30) if most >= 0.1 * 2**30 else ("MiB", 2**20)
    rows = []
    for number, pipeline in enumerate(plan.get("pipelines", ())):
        for index, stage in enumerate(pipeline.get("stages", ())):
            known = [history.memory[rank] for rank in stage["ranks"] if rank < len(history.memory)]
            if known and most > 0.0:
                used, predicted = (max(values) for values in zip(*known, strict=True))
                words = f"pipeline {number}, stage {index}: {used / unit:.3g} {name} in use"
                words += f", {predicted / unit:.3g} predicted" if predicted else ""
                width, mark_x = used / most * WIDTH, predicted / most * WIDTH
                rows.append({"words": words, "width": width, "mark_x": mark_x})
    return rows
