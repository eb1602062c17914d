"""Write a simulation as a Chrome trace: open it in https://ui.perfetto.dev or chrome://tracing.

One process per pipeline and, per stage, one row for computation and one for each kind of traffic,
since these overlap.
"""

import json
from pathlib import Path
from typing import Any

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.simulator.simulate import Event, Simulation

__all__ = ["save_trace", "trace_events"]

_NAMES = {
    "F": "forward",
    "B": "backward",
    "SF": "send activation",
    "SB": "send gradient",
    "pull": "pull weights",
    "push": "push gradients",
    "step": "optimizer step",
}
_ROWS = ("", "hidden states", "gradients of hidden states", "pull", "push")
_ROW_OF = {"SF": 1, "SB": 2, "pull": 3, "push": 4}


def trace_events(plan: ParallelPlan, simulation: Simulation) -> list[dict[str, Any]]:
    """Return the simulation's events in the Trace Event Format, times in microseconds.

    Raises:
        ConfigurationError: The simulation recorded no events.
    """
    if not simulation.events:
        raise ConfigurationError(
            "The simulation recorded no events. Call simulate(..., record_events=True)."
        )
    rows: list[dict[str, Any]] = []
    for pipeline_index, pipeline in enumerate(plan.pipelines):
        rows.append(_named("process_name", f"pipeline {pipeline_index}", pipeline_index, 0))
        for stage_index, stage in enumerate(pipeline.stages):
            ranks = ",".join(map(str, stage.ranks))
            label = f"stage {stage_index} (ranks {ranks})"
            for row, what in enumerate(_ROWS):
                name = f"{label} {what}".rstrip()
                rows.append(_named("thread_name", name, pipeline_index, _row(stage_index, row)))
    return rows + [_as_row(event) for event in simulation.events]


def save_trace(path: str | Path, plan: ParallelPlan, simulation: Simulation) -> None:
    """Write the trace as JSON; ConfigurationError without events, or if it can't be written."""
    data = {"traceEvents": trace_events(plan, simulation), "displayTimeUnit": "ms"}
    try:
        Path(path).write_text(json.dumps(data), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"Can't write the trace {path}: {error.strerror}.") from error


def _as_row(event: Event) -> dict[str, Any]:
    name = _NAMES[event.kind]
    if event.microbatch_index >= 0:
        name = f"{name} {event.microbatch_index}"
    return {
        "name": name,
        "cat": event.kind,
        "ph": "X",
        "ts": event.start_s * 1e6,
        "dur": (event.end_s - event.start_s) * 1e6,
        "pid": event.pipeline_index,
        "tid": _row(event.stage_index, _ROW_OF.get(event.kind, 0)),
    }


def _row(stage_index: int, row: int) -> int:
    return len(_ROWS) * stage_index + row


def _named(kind: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
