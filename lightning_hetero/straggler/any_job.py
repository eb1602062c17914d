"""Find the iterations of any job in a recording of it, and the changes of their times.

Each file belongs to one rank. Its kind is recognised by its content:

- a list of iteration times in seconds (one per line, or the last column of CSV), as `record`
  writes;
- a torch profiler's trace (`export_chrome_trace`, `.json` or `.json.gz`): complete events named
  `nccl:`, `gloo:`, `mpi:`, `record_param_comms` or `c10d::`. One call appears under several of
  these names, so only the family that is found first in that order counts;
- a dump of NCCL's flight recorder (`TORCH_NCCL_TRACE_BUFFER_SIZE`, `TORCH_FR_BUFFER_SIZE`), JSON or
  pickle. A pickle may contain plain dicts, lists, strings and numbers only: anything that names a
  class or function is refused before it can run.

Training repeats the same operations, so the first lag at which their autocorrelation reaches 0.95
is the number of operations in an iteration (Greyhound). Operations are categories (name, size,
group), so their autocorrelation is the share of operations that equal the operation `lag` places
later, corrected for chance.
"""

import gzip
import io
import math
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lightning_hetero.core.arrays import IntArray
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.texts import parse_json, show
from lightning_hetero.straggler.bocd import BocdDetector
from lightning_hetero.straggler.events import Event, IterationEvent

_FEWEST = 2
_LEAST_CORRELATION = 0.95
_MOST_OPS = 20_000
"""Operations of the longest iteration that is looked for, so that a million of which nothing
repeats are refused within half a minute."""
_FAMILIES = (("nccl:", "gloo:", "mpi:", "ucc:"), ("record_param_comms",), ("c10d::",))
_TRACE_KEYS = ("Collective name", "In msg nelems", "Input Dims", "dtype", "Process Group Name")
_Op = tuple[float, str]
"""An operation's start in seconds, and its category: name, size, group."""


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

    ::

        times = read_times("stragglers/rank0.jsonl").times_s
        slow = [event for event in find_changes(times) if isinstance(event, ChangeEvent)]

    Args:
        path: Iteration times, a torch profiler's trace, or a dump of NCCL's flight recorder.

    Raises:
        ConfigurationError: The file is of no known kind, or nothing in it repeats.
    """
    content = _read(path)
    if content[:1] == b"\x80":
        return _periodic(_operations(_unpickle(content, path), path), path)
    if content.lstrip()[:1] not in (b"{", b"["):
        return _listed(content, path)
    data = parse_json(content, f"file {path}", ConfigurationError, is_ours=False)
    return _periodic(_operations(data, path), path)


def find_changes(times_s: Sequence[float]) -> list[Event]:
    """Detect lasting changes of the iteration time.

    Args:
        times_s: Seconds of each iteration, oldest first.

    Returns:
        An `IterationEvent` for each, followed by a `ChangeEvent` if it completes a change.
    """
    detector = BocdDetector()
    events: list[Event] = []
    for step, time_s in enumerate(times_s):
        events.append(IterationEvent(step=step, iteration_s=time_s))
        if (change := detector.update(time_s)) is not None:
            events.append(replace(change, where="the job"))
    return events


def _read(path: str | Path) -> bytes:
    """Return a file's bytes, decompressed; ConfigurationError if it can't be read."""
    try:
        content = Path(path).read_bytes()
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"Can't read {path}: {reason}.") from error


def _listed(content: bytes, path: str | Path) -> IterationTimes:
    """Return the numbers in a text: one per line, or the last of each line of CSV."""
    times_s: list[float] = []
    lines = content.decode("utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        cell = line.replace(";", ",").split(",")[-1].strip()
        if not cell or cell.startswith("#"):
            continue
        try:
            time_s = float(cell)
        except ValueError:
            if number == 1:  # It may name the columns.
                continue
            time_s = math.nan
        if not 0 <= time_s < 1e9:
            raise ConfigurationError(
                f"{path}, line {number}: {show(cell)} isn't a number of seconds, 0 or more. "
                f"{_wanted(path)}"
            )
        times_s.append(time_s)
    if len(times_s) < _FEWEST:
        raise ConfigurationError(
            f"{path} holds {len(times_s)} iteration times; give at least {_FEWEST}. {_wanted(path)}"
        )
    return IterationTimes(source="a list of iteration times", times_s=tuple(times_s))


def _wanted(path: str | Path) -> str:
    return (
        f"{path} must be an event log of StragglerMonitor, a torch profiler's trace, an NCCL "
        "flight recorder's dump, or a list of seconds, one per line, such as "
        "lightning_hetero.straggler.record() writes."
    )


class _PlainUnpickler(pickle.Unpickler):
    """Loads containers, strings and numbers; refuses every class and function."""

    def find_class(self, module: str, name: str, /) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which could run code")


def _unpickle(content: bytes, path: str | Path) -> Any:
    try:
        return _PlainUnpickler(io.BytesIO(content)).load()
    except Exception as error:
        # On bytes that aren't a pickle the unpickler may raise any exception.
        raise ConfigurationError(
            f"{path} can't be read as a flight-recorder pickle: {str(error)[:200]}. Dump it as "
            "JSON instead."
        ) from error


def _operations(data: Any, path: str | Path) -> list[_Op]:
    """Return the operations in a flight recorder's dump, or the communication in a trace."""
    name, start, per_s = "profiling_name", "time_created_ns", 1e9
    keys: tuple[str, ...] = ("input_sizes", "input_dtypes", "process_group")
    try:
        if isinstance(data, Mapping) and "entries" in data:
            ops = data["entries"]
        else:
            name, start, per_s, keys = "name", "ts", 1e6, _TRACE_KEYS
            rows = data["traceEvents"] if isinstance(data, Mapping) else data
            ops = _communication([row for row in rows if row.get("ph") == "X"])
        found = []
        for op in ops:
            facts = op if per_s == 1e9 else op.get("args") or {}
            kind = f"{op[name]} {[facts.get(key) for key in keys]}"
            found.append((float(op[start]) / per_s, kind))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise ConfigurationError(f"{path} has an entry that can't be read ({reason}).") from error
    if not found or not np.isfinite([seconds for seconds, _ in found]).all():
        raise ConfigurationError(
            f"{path} has no communication (nccl:, gloo:, record_param_comms), or a time that isn't "
            f"finite. {_wanted(path)}"
        )
    return found


def _communication(rows: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of the family of names that is found first."""
    for family in _FAMILIES:
        if found := [row for row in rows if str(row.get("name", "")).startswith(family)]:
            return found
    return []


def _periodic(ops: Sequence[_Op], path: str | Path) -> IterationTimes:
    """Return the iterations of operations that repeat, except for start-up and validations."""
    ops = sorted(ops)
    codes = np.unique([kind for _, kind in ops], return_inverse=True)[1]
    lags = range(1, min(len(ops) // 2, _MOST_OPS) + 1)
    lag = next((n for n in lags if _repeats(codes, n)), None)
    if lag is None or len(ops) < 2 * _FEWEST:
        raise ConfigurationError(
            f"Nothing repeats in the {len(ops)} operations of {path}, so no iteration shows. "
            "Record at least two iterations, better some dozens."
        )
    starts = [ops[index][0] for index in _starts(codes, lag)]
    return IterationTimes(
        source=f"{lag} operations an iteration",
        times_s=tuple(b - a for a, b in pairwise(starts)),
    )


def _repeats(codes: IntArray, lag: int) -> bool:
    """Return whether operations equal those `lag` places later, more than by chance."""
    first, later = codes[:-lag], codes[lag:]
    share = float((first == later).mean())
    if share < _LEAST_CORRELATION:
        return False
    counts = (np.bincount(part, minlength=int(codes.max()) + 1) for part in (first, later))
    chance = float(np.dot(*counts)) / len(first) ** 2
    # In a sequence of one category every operation is a repetition.
    return chance > 1.0 - 1e-9 or (share - chance) / (1.0 - chance) >= _LEAST_CORRELATION


def _starts(codes: IntArray, lag: int) -> list[int]:
    """Return where iterations start: at a category that occurs once in each, if there is one.

    Following one category stays in step if other operations intervene (a validation, a log).
    Without such a category every `lag`-th operation is a start.
    """
    num_iterations = len(codes) / lag
    _, first, counts = np.unique(codes, return_index=True, return_counts=True)
    once = first[np.abs(counts - num_iterations) <= 0.1 * num_iterations]
    if len(once):
        # Of the categories that occur once, the one that comes first.
        return np.flatnonzero(codes == codes[once.min()]).tolist()
    return list(range(len(codes) % lag, len(codes), lag))
