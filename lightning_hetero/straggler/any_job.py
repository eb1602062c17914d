"""Find the iterations of any job in a recording of it, and the changes of their times.

A file is one rank's; its content shows what it is:

- an event log, or a plain list of iteration times (one a line, the last column of CSV, or JSON);
- what `record` wrote;
- a torch profiler's trace (`export_chrome_trace`, `.json` or `.json.gz`): complete events named
  `nccl:`, `gloo:`, `mpi:`, `record_param_comms` or `c10d::`. One call shows up under several of
  these names, so only the family found first in that order is taken;
- a dump of NCCL's flight recorder (`TORCH_NCCL_TRACE_BUFFER_SIZE`, `TORCH_FR_BUFFER_SIZE`), JSON
  or pickle. A pickle may hold plain dicts, lists, strings and numbers only: anything that names a
  class or function is refused before it could run.

Steps of an optimizer end iterations, if there are any; else the operations' period does (`period`).
"""

import gzip
import io
import json
import math
import pickle
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.texts import parse_json, show
from lightning_hetero.straggler.bocd import BocdDetector
from lightning_hetero.straggler.events import ChangeEvent, Event, IterationEvent
from lightning_hetero.straggler.period import CommunicationOp, infer_period

__all__ = [
    "OPTIMIZER_STEP",
    "IterationTimes",
    "as_line",
    "find_changes",
    "is_event_log",
    "read_flight_recorder",
    "read_profiler_trace",
    "read_times",
]

OPTIMIZER_STEP = "optimizer_step"
"""Name of the operation that stands for a step of an optimizer, in what `record` writes."""
_FEWEST = 2
_FAMILIES = (("nccl:", "gloo:", "mpi:", "ucc:"), ("record_param_comms",), ("c10d::",))
_ITEM_BYTES = {
    name: size
    for size, names in {
        1: "bool byte char int8 uint8",
        2: "short half bfloat16 float16",
        4: "int float float32 int32",
        8: "long double float64 int64",
    }.items()
    for name in names.split()
}


@dataclass(frozen=True, kw_only=True)
class IterationTimes:
    """The iterations of a job that were found in one file."""

    source: str
    """How they were found, in words."""
    times_s: tuple[float, ...]
    """Seconds of each iteration, oldest first."""


def is_event_log(path: str | Path) -> bool:
    """Return whether a file is the event log of a run under our callbacks, or is empty."""
    first = _read(path).lstrip().split(b"\n", 1)[0]
    return not first or (first.startswith(b"{") and b'"event"' in first)


def read_times(path: str | Path) -> IterationTimes:
    """Return the iterations that are found in a file.

    Raises:
        ConfigurationError: The file is of no known kind, or nothing in it repeats.
    """
    content = _read(path)
    start = content.lstrip()
    if content[:1] == b"\x80":
        return _from_ops(read_flight_recorder(path), path)
    if start[:1] not in (b"{", b"["):
        return _plain(_numbers_of(content, path), path)
    if start.startswith(b'{"op"'):
        return _from_recording(content, path)
    data = parse_json(content, f"file {path}", ConfigurationError, is_ours=False)
    if isinstance(data, list) and all(isinstance(item, int | float) for item in data):
        return _plain(data, path)
    is_dump = isinstance(data, dict) and "entries" in data
    return _from_ops((read_flight_recorder if is_dump else read_profiler_trace)(path), path)


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


def _from_recording(content: bytes, path: str | Path) -> IterationTimes:
    """Return the iterations in a file of `record`: between optimizer steps, if it has any.

    Of several optimizers the one with the most bytes of parameters counts.
    """
    # The last line may be torn: the job may have been killed while it wrote.
    lines = enumerate(content.split(b"\n")[:-1], start=1)
    ops = [_recorded(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    ops.sort(key=lambda op: op.start_s)
    sizes = Counter(op.num_bytes for op in ops if op.name == OPTIMIZER_STEP)
    repeated = [size for size, count in sizes.items() if count > _FEWEST]
    if not repeated:
        return _from_ops([op for op in ops if op.name != OPTIMIZER_STEP], path)
    last = OPTIMIZER_STEP, max(repeated)
    ends = [op.start_s for op in ops if (op.name, op.num_bytes) == last]
    return IterationTimes(
        source="from one step of the optimizer to the next",
        times_s=tuple(b - a for a, b in pairwise(ends)),
    )


def _recorded(line: bytes, where: str) -> CommunicationOp:
    entry = parse_json(line, where, ConfigurationError)
    try:
        return CommunicationOp(
            name=str(entry["op"]),
            num_bytes=int(entry["num_bytes"]),
            start_s=_finite(entry["start_s"]),
            group=str(entry.get("group", "")),
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ConfigurationError(
            f"{where}: {show(entry)} is no recorded operation: {error}."
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


def read_profiler_trace(path: str | Path) -> tuple[CommunicationOp, ...]:
    """Return the communication operations of a torch profiler trace of one rank, oldest first.

    Raises:
        ConfigurationError: The file is no Chrome trace, or holds no communication.
    """
    data = _parse(_read(path), path)
    events = data.get("traceEvents") if isinstance(data, Mapping) else data
    if not isinstance(events, list):
        raise ConfigurationError(f"{path} has no traceEvents; give a torch profiler's JSON trace.")
    complete = [e for e in events if isinstance(e, Mapping) and e.get("ph") == "X"]
    for family in _FAMILIES:
        chosen = [e for e in complete if str(e.get("name", "")).startswith(family)]
        if chosen:
            return _sorted(_from_trace_event(event, path) for event in chosen)
    raise ConfigurationError(
        f"{path} holds {len(complete)} events but no communication (names nccl:, gloo:, "
        "record_param_comms). Profile a rank of a distributed run."
    )


def read_flight_recorder(path: str | Path) -> tuple[CommunicationOp, ...]:
    """Return the operations of one rank's flight-recorder dump, JSON or pickle, oldest first.

    Raises:
        ConfigurationError: The file is neither, or the pickle names anything but plain data.
    """
    content = _read(path)
    data = _parse(content, path) if content[:1] in b"{[" else _unpickle(content, path)
    entries = data.get("entries") if isinstance(data, Mapping) else None
    if not isinstance(entries, list | tuple):
        raise ConfigurationError(f"{path} has no list of entries; give a flight-recorder dump.")
    return _sorted(_from_entry(entry, path) for entry in entries)


def _sorted(ops: Iterable[CommunicationOp]) -> tuple[CommunicationOp, ...]:
    return tuple(sorted(ops, key=lambda op: op.start_s))


def _read(path: str | Path) -> bytes:
    """Return a file's bytes, decompressed; ConfigurationError if it can't be read."""
    try:
        content = Path(path).read_bytes()
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"Can't read {path}: {reason}.") from error


def _parse(content: bytes, path: str | Path) -> Any:
    return parse_json(content, f"file {path}", ConfigurationError, is_ours=False)


class _PlainUnpickler(pickle.Unpickler):
    """Loads containers, strings and numbers; refuses every class and function."""

    def find_class(self, module: str, name: str, /) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which could run code")


def _unpickle(content: bytes, path: str | Path) -> Any:
    try:
        return _PlainUnpickler(io.BytesIO(content)).load()
    except Exception as error:
        # Bytes that are no pickle lead the unpickler into any exception.
        raise ConfigurationError(
            f"{path} can't be read as a flight-recorder pickle: {str(error)[:200]}. Dump it as "
            "JSON instead."
        ) from error


def _from_trace_event(event: Mapping[str, Any], path: str | Path) -> CommunicationOp:
    try:
        start_s = _finite(event["ts"]) / 1e6
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"{path}: event {show(event.get('name'))} has no ts.") from error
    args = event.get("args")
    args = args if isinstance(args, Mapping) else {}
    num_items = args.get("In msg nelems")
    if not isinstance(num_items, int):
        num_items = _count_items(args.get("Input Dims"))
    return CommunicationOp(
        name=str(args.get("Collective name") or event["name"]),
        num_bytes=num_items * _ITEM_BYTES.get(str(args.get("dtype", "")).lower(), 1),
        start_s=start_s,
        group=str(args.get("Process Group Name", "")),
    )


def _from_entry(entry: Any, path: str | Path) -> CommunicationOp:
    if not isinstance(entry, Mapping) or "profiling_name" not in entry:
        raise ConfigurationError(f"{path}: an entry has no profiling_name: {show(entry)}.")
    group = entry.get("process_group", "")
    try:
        dtypes = [str(name).lower() for name in entry.get("input_dtypes") or ()]
        return CommunicationOp(
            name=str(entry["profiling_name"]),
            num_bytes=_count_items(entry.get("input_sizes"))
            * (_ITEM_BYTES.get(dtypes[0], 1) if dtypes else 1),
            start_s=_finite(entry.get("time_created_ns", 0)) / 1e9,
            group=str(group[0]) if isinstance(group, list | tuple) and group else str(group),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"{path}: an entry is broken: {show(entry)}: {error}.") from error


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is no time")
    return number


def _count_items(sizes: Any) -> int:
    """Return the number of elements of nested lists of shapes."""
    if not isinstance(sizes, list | tuple):
        return 0
    if sizes and all(isinstance(size, int) for size in sizes):
        return math.prod(sizes)
    return sum(_count_items(size) for size in sizes)
