"""Gather what callbacks wrote into a folder: event logs, recordings and operation traces."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_hetero.core.errors import ConfigurationError, HeteroError
from lightning_hetero.core.event_log import read_entries
from lightning_hetero.straggler import find_changes, read_times
from lightning_hetero.straggler.any_job import is_event_log
from lightning_hetero.straggler.events import to_entry
from lightning_hetero.straggler.traces import read_operations, trace_files
from lightning_hetero.straggler.what_if import answer, explain

_TRACES = ("*.parquet", "operations*.jsonl", "operations*.jsonl.gz")
_SILENT_S = 600.0
"""A run that has written nothing for this long, and hasn't ended, is called silent."""
_SCALARS = {"metrics": "scalars", "checkpoint": "complete"}
_TIME_LESS = ("event", "at_s", "step")


@dataclass(frozen=True)
class RunEvent:
    """One event of a run that the page lists: any but the metrics that every step has."""

    kind: str
    step: int
    at_s: float | None
    text: str


@dataclass
class RunHistory:
    """All that the logs in a run's folder say about it."""

    folder: str
    scalars: dict[str, dict[int, float]] = field(default_factory=dict)
    """What `RunMetrics` logged, and the iteration times, by name and step."""
    events: list[RunEvent] = field(default_factory=list)
    plans: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Each plan with the first step that ran under it."""
    memory: list[tuple[float, float]] = field(default_factory=list)
    """For each rank its bytes in use, newest, and those that were predicted; 0 if unknown."""
    nodes: tuple[str, ...] = ()
    verdicts: list[str] = field(default_factory=list)
    first_s: float | None = None
    last_s: float | None = None
    state: str = "recorded"
    """`running`, `silent`, `failed` or `ended`; `recorded` if there is no log."""
    _numbered: list[dict[str, Any]] = field(default_factory=list)

    def add(self, entry: dict[str, Any]) -> None:
        """Add one event of a log."""
        event, at_s = str(entry.get("event")), _number(entry.get("at_s"))
        step = entry.get("step")
        step = step if isinstance(step, int) else 0
        if at_s is not None:
            self.first_s = at_s if self.first_s is None else min(self.first_s, at_s)
            self.last_s = at_s if self.last_s is None else max(self.last_s, at_s)
        if event in ("iteration", "metrics", "checkpoint"):
            values = entry.get(_SCALARS.get(event, ""), entry)
            prefix = "checkpoint/" if event == "checkpoint" else ""
            for name, value in values.items() if isinstance(values, dict) else ():
                number = _number(value)
                if number is not None:
                    self.scalars.setdefault(f"{prefix}{name}", {})[step] = number
            if event == "metrics":
                self._add_memory(entry.get("memory"))
            return
        if event in ("started", "plan"):
            self._add_plans(event, step, entry)
        self.events.append(RunEvent(event, step, at_s, _text(entry)))
        self.state = event if event in ("failed", "ended") else "running"

    @property
    def times_s(self) -> dict[int, float]:
        """Seconds of each iteration, by step."""
        return self.scalars.get("iteration_s") or self.scalars.get("run/iteration_s", {})

    @property
    def predicted_s(self) -> dict[int, float]:
        """Predicted seconds of each iteration, by step."""
        return self.scalars.get("predicted_s", {})

    def _add_memory(self, rows: object) -> None:
        if isinstance(rows, list) and all(isinstance(r, list) and len(r) == 2 for r in rows):
            self.memory = [(_number(used) or 0.0, _number(most) or 0.0) for used, most in rows]

    def _add_plans(self, event: str, step: int, entry: dict[str, Any]) -> None:
        if event == "started":
            self._numbered = [plan for plan in entry.get("plans", ()) if isinstance(plan, dict)]
            self.nodes = tuple(map(str, entry.get("nodes", ())))
            return
        number, plan = entry.get("number"), entry.get("plan")
        if isinstance(plan, dict):
            self._numbered.append(plan)
        elif isinstance(number, int) and 0 <= number < len(self._numbered):
            plan = self._numbered[number]
        if isinstance(plan, dict):
            self.plans.append((step, plan))


def read_history(folder: Path) -> RunHistory:
    """Read all logs, recordings and traces of a folder.

    Raises:
        ConfigurationError: It isn't a folder, or holds nothing that callbacks write.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} isn't a folder. Give the folder that the run wrote to.")
    history = RunHistory(str(folder))
    found = {path for pattern in _TRACES for path in folder.rglob(pattern)}
    # The files of the ranks of one run are one trace.
    traces = sorted({p.parent if p in trace_files(p.parent) else p for p in found})
    logs = [path for path in sorted(folder.rglob("*.jsonl")) if path not in found]
    entries = [entry for path in logs for entry in _entries(path, history)]
    # Events of several logs of a run are sorted by time; recordings have no times.
    for entry in sorted(entries, key=lambda entry: _number(entry.get("at_s")) or 0.0):
        history.add(entry)
    for path in traces:
        try:
            history.verdicts.append(f"{path.name}: {answer(explain(read_operations(path)))}")
        except HeteroError as error:
            history.verdicts.append(f"{path.name}: {error}")
    if not entries and not traces:
        raise ConfigurationError(
            f"{folder} holds no event log, recording or operation trace. RunLog(), "
            f"StragglerMonitor() and lightning_hetero.straggler.record() write .jsonl files."
        )
    if history.state in ("running", "recorded") and history.last_s is not None:
        history.state = "running" if time.time() - history.last_s <= _SILENT_S else "silent"
    return history


def _entries(path: Path, history: RunHistory) -> Iterator[dict[str, Any]]:
    """Yield the events of a log, or those found in a recording of one rank."""
    try:
        if is_event_log(path):
            yield from (entry for _, entry in read_entries(path) if isinstance(entry, dict))
            return
        found = read_times(path)
    except (OSError, UnicodeDecodeError, HeteroError) as error:
        history.verdicts.append(f"{path.name} was left out: {error}")
        return
    history.verdicts.append(f"{path.name}: found {found.source}.")
    yield from map(to_entry, find_changes(found.times_s))


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    number = float(value)
    return number if abs(number) < float("inf") else None


def _text(entry: dict[str, Any]) -> str:
    """Return an event's fields in one line; plans are drawn instead."""
    shown = {k: v for k, v in entry.items() if k not in (*_TIME_LESS, "plan", "plans")}
    return ", ".join(f"{name} {_short(value)}" for name, value in shown.items())


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_short(part)}" for name, part in list(value.items())[:8])
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]} …"
