"""Find the iterations of any job in a recording of it, and the changes of their times.

A file is one rank's: a torch profiler's trace, an NCCL flight recorder's dump, a file of `record`,
or a plain list of iteration times; its content shows which. If it has steps of an optimizer, these
end the iterations; else an iteration is the period with which operations repeat (`period`).
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.reading import parse_json, show
from lightning_hetero.straggler.any_job.period import CommunicationOp, infer_period
from lightning_hetero.straggler.any_job.traces import (
    read_content,
    read_flight_recorder,
    read_profiler_trace,
)
from lightning_hetero.straggler.bocd import BocdDetector
from lightning_hetero.straggler.events import ChangeEvent, Event, IterationEvent

__all__ = [
    "OPTIMIZER_STEP",
    "IterationTimes",
    "as_line",
    "find_changes",
    "is_event_log",
    "read_times",
]

OPTIMIZER_STEP = "optimizer_step"
"""Name of the operation that stands for a step of an optimizer, in what `record` writes."""
_FEWEST = 2
_HEAD_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class IterationTimes:
    """The iterations of a job that were found in one file."""

    source: str
    """How they were found, in words."""
    times_s: tuple[float, ...]
    """Seconds of each iteration, oldest first."""


def is_event_log(path: str | Path) -> bool:
    """Return whether a file is the event log of a run under our callbacks, or is empty."""
    head = read_content(path)[:_HEAD_BYTES].lstrip()
    first = head.split(b"\n", 1)[0]
    return not head or (first.startswith(b"{") and b'"event"' in first)


def read_times(path: str | Path) -> IterationTimes:
    """Return the iterations that are found in a file.

    Raises:
        ConfigurationError: The file is of no known kind, or nothing in it repeats.
    """
    content = read_content(path)
    start = content.lstrip()[:1]
    if content[:1] == b"\x80":
        return _from_ops(read_flight_recorder(path), path)
    if start not in (b"{", b"["):
        return _plain(_numbers_of(content, path), path)
    if _is_recording(content):
        return _from_recording(content, path)
    data = parse_json(content, f"file {path}", ConfigurationError, is_ours=False)
    if isinstance(data, list) and all(isinstance(item, int | float) for item in data):
        return _plain(data, path)
    if isinstance(data, dict) and "entries" in data:
        return _from_ops(read_flight_recorder(path), path)
    return _from_ops(read_profiler_trace(path), path)


def find_changes(times_s: Sequence[float]) -> list[Event]:
    """Return events of all iterations, each followed by the change that it completes, if any."""
    detector = BocdDetector()
    events: list[Event] = []
    for step, time_s in enumerate(times_s):
        events.append(IterationEvent(step=step, iteration_s=time_s))
        change = detector.update(time_s)
        if change is not None:
            onset = change.onset_step
            found = ChangeEvent.from_change(change, step=step, onset_step=onset, where="the job")
            events.append(found)
    return events


def _from_ops(ops: Sequence[CommunicationOp], path: str | Path) -> IterationTimes:
    """Return the iterations of a stream of operations."""
    period = infer_period(ops)
    if period is None or not period.iteration_times_s:
        raise ConfigurationError(
            f"Nothing repeats in the {len(ops)} operations of {path}, so no iteration shows. "
            "Record at least two iterations, better some dozens."
        )
    return IterationTimes(
        source=f"{period.num_ops} operations an iteration (they repeat with correlation "
        f"{period.correlation:.3f})",
        times_s=period.iteration_times_s,
    )


def _is_recording(content: bytes) -> bool:
    first = content.lstrip().split(b"\n", 1)[0]
    return first.startswith(b'{"op"')


def _from_recording(content: bytes, path: str | Path) -> IterationTimes:
    """Return the iterations in a file of `record`: between optimizer steps, if it has any.

    Of several optimizers the one with the most bytes of parameters counts.
    """
    ops = []
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        # The last line may be torn: the job may have been killed while it wrote.
        if line.strip() and number < len(lines):
            entry = parse_json(line, f"line {number} of {path}", ConfigurationError)
            ops.append(_op_of(entry, number, path))
    ops.sort(key=lambda op: op.start_s)
    sizes = Counter(op.num_bytes for op in ops if op.name == OPTIMIZER_STEP)
    repeated = [size for size, count in sizes.items() if count > _FEWEST]
    if not repeated:
        return _from_ops([op for op in ops if op.name != OPTIMIZER_STEP], path)
    largest = max(repeated)
    ends = [op.start_s for op in ops if (op.name, op.num_bytes) == (OPTIMIZER_STEP, largest)]
    return IterationTimes(
        source="from one step of the optimizer to the next",
        times_s=tuple(b - a for a, b in pairwise(ends)),
    )


def _op_of(entry: Any, number: int, path: str | Path) -> CommunicationOp:
    try:
        start_s = float(entry["start_s"])
        if not math.isfinite(start_s):
            raise ValueError("start_s is no finite number")
        return CommunicationOp(
            name=str(entry["op"]),
            num_bytes=int(entry["num_bytes"]),
            start_s=start_s,
            group=str(entry.get("group", "")),
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ConfigurationError(
            f"{path}, line {number}: {show(entry)} is no recorded operation: {error}."
        ) from error


def _numbers_of(content: bytes, path: str | Path) -> list[float]:
    """Return the numbers of a text: one a line, or the last of each line of CSV."""
    numbers = []
    try:
        lines = content.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigurationError(_unknown(path)) from error
    for number, line in enumerate(lines, start=1):
        cell = line.replace(";", ",").split(",")[-1].strip()
        if not cell or cell.startswith("#"):
            continue
        try:
            numbers.append(float(cell))
        except ValueError as error:
            # The first line may name the columns.
            if numbers or number > 1:
                raise ConfigurationError(
                    f"{path}, line {number}: {show(cell)} is no number of seconds. {_unknown(path)}"
                ) from error
    return numbers


def _plain(numbers: Iterable[float], path: str | Path) -> IterationTimes:
    times_s = []
    for number in numbers:
        if isinstance(number, bool) or not 0 <= number < 1e9:
            raise ConfigurationError(
                f"{path}: {show(number)} is no iteration's time; give seconds, 0 or more."
            )
        times_s.append(float(number))
    if len(times_s) < _FEWEST:
        raise ConfigurationError(
            f"{path} holds {len(times_s)} iteration times; give at least {_FEWEST}. "
            f"{_unknown(path)}"
        )
    return IterationTimes(source="a list of iteration times", times_s=tuple(times_s))


def _unknown(path: str | Path) -> str:
    return (
        f"{path} must be an event log of StragglerMonitor, a torch profiler's trace, an NCCL "
        "flight recorder's dump, what lightning_hetero.straggler.record() wrote, or a list of "
        "seconds, one a line."
    )


def as_line(op: CommunicationOp) -> str:
    """Return a recorded operation as a line of the file that `read_times` reads."""
    data = {"op": op.name, "num_bytes": op.num_bytes, "start_s": op.start_s, "group": op.group}
    return json.dumps(data)
