"""Write a simulation as a Chrome trace: open it in https://ui.perfetto.dev or chrome://tracing.

One process per pipeline and, per stage, one thread that computes and one that talks.
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
_COMPUTE = frozenset({"F", "B", "step"})


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
            rows.append(_named("thread_name", label, pipeline_index, 2 * stage_index))
            rows.append(
                _named("thread_name", f"{label} traffic", pipeline_index, 2 * stage_index + 1)
            )
    return rows + [_as_row(event) for event in simulation.events]


def save_trace(path: str | Path, plan: ParallelPlan, simulation: Simulation) -> None:
    """Write the trace as JSON; ConfigurationError if nothing was recorded or the path is wrong."""
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
        "tid": 2 * event.stage_index + (event.kind not in _COMPUTE),
    }


def _named(kind: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
