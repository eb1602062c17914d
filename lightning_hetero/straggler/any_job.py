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
group), so their autocorrelation is that of their one-hot codes: the share of operations that equal
the operation `lag` places later, corrected for chance. All lags are computed at once by FFT.
"""

import gzip
import io
import math
import pickle
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.texts import parse_json, show
from lightning_hetero.straggler.bocd import BocdDetector
from lightning_hetero.straggler.events import ChangeEvent, Event, IterationEvent

_FEWEST = 2
_LEAST_CORRELATION = 0.95
_MOST_KINDS = 64
_FAMILIES = (("nccl:", "gloo:", "mpi:", "ucc:"), ("record_param_comms",), ("c10d::",))
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
        return _periodic(_dumped(_unpickle(content, path), path), path)
    if content.lstrip()[:1] not in (b"{", b"["):
        return _listed(content, path)
    data = parse_json(content, f"file {path}", ConfigurationError, is_ours=False)
    is_dump = isinstance(data, dict) and "entries" in data
    return _periodic((_dumped if is_dump else _traced)(data, path), path)


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
            events.append(ChangeEvent(**vars(change), where="the job"))
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


def _traced(data: Any, path: str | Path) -> list[_Op]:
    """Return the communication operations of a torch profiler's trace."""
    events = data.get("traceEvents") if isinstance(data, Mapping) else data
    if not isinstance(events, list):
        raise ConfigurationError(f"{path} has no traceEvents; give a torch profiler's JSON trace.")
    complete = [e for e in events if isinstance(e, Mapping) and e.get("ph") == "X"]
    keys = ("Collective name", "In msg nelems", "Input Dims", "dtype", "Process Group Name")
    for family in _FAMILIES:
        chosen = [e for e in complete if str(e.get("name", "")).startswith(family)]
        if chosen:
            return [
                (_number(e, "ts", path) / 1e6, _kind(e["name"], e.get("args"), keys))
                for e in chosen
            ]
    raise ConfigurationError(
        f"{path} holds {len(complete)} events but no communication (names nccl:, gloo:, "
        "record_param_comms). Profile a rank of a distributed run."
    )


def _dumped(data: Any, path: str | Path) -> list[_Op]:
    """Return the operations of one rank's flight-recorder dump."""
    entries = data.get("entries") if isinstance(data, Mapping) else None
    if not isinstance(entries, list | tuple):
        raise ConfigurationError(f"{path} has no list of entries; give a flight-recorder dump.")
    keys, found = ("input_sizes", "input_dtypes", "process_group"), []
    for entry in entries:
        if not isinstance(entry, Mapping) or "profiling_name" not in entry:
            raise ConfigurationError(f"{path}: an entry has no profiling_name: {show(entry)}.")
        kind = _kind(entry["profiling_name"], entry, keys)
        found.append((_number(entry, "time_created_ns", path) / 1e9, kind))
    return found


def _number(entry: Mapping[str, Any], name: str, path: str | Path) -> float:
    number = entry.get(name)
    if not isinstance(number, int | float) or not abs(number) < 1e300:
        raise ConfigurationError(f"{path}: {show(entry)} has no finite number {name}.")
    return float(number)


def _kind(name: Any, entry: Any, keys: Sequence[str]) -> str:
    known = entry if isinstance(entry, Mapping) else {}
    return f"{name} {[known.get(key) for key in keys]}"


def _periodic(ops: Sequence[_Op], path: str | Path) -> IterationTimes:
    """Return the iterations of operations that repeat, except for start-up and validations."""
    ops = sorted(ops)
    kinds = Counter(kind for _, kind in ops).most_common(_MOST_KINDS - 1)
    number = {kind: i for i, (kind, _) in enumerate(kinds)}
    # Rare categories share a number.
    codes = np.array([number.get(kind, len(number)) for _, kind in ops], np.int64)
    correlations = _autocorrelation(codes) if len(codes) >= 2 * _FEWEST else np.zeros(1)
    good = np.flatnonzero(correlations[1:] >= _LEAST_CORRELATION)
    if not len(good):
        raise ConfigurationError(
            f"Nothing repeats in the {len(ops)} operations of {path}, so no iteration shows. "
            "Record at least two iterations, better some dozens."
        )
    lag = int(good[0]) + 1
    starts = [ops[index][0] for index in _starts(codes, lag)]
    return IterationTimes(
        source=f"{lag} operations an iteration (they repeat with correlation "
        f"{correlations[lag]:.3f})",
        times_s=tuple(b - a for a, b in pairwise(starts)),
    )


def _autocorrelation(codes: IntArray) -> FloatArray:
    """Return the correlation of one-hot codes for lags 0 to n/2."""
    num_ops = len(codes)
    size, lags = 1 << (2 * num_ops - 1).bit_length(), np.arange(num_ops // 2 + 1)
    overlap = num_ops - lags
    share, chance = np.zeros((2, len(lags)))
    for kind in np.unique(codes):
        present = (codes == kind).astype(np.float64)
        spectrum = np.fft.rfft(present, size)
        share += np.fft.irfft(spectrum * spectrum.conj(), size)[lags] / overlap
        seen = np.concatenate(([0.0], np.cumsum(present)))
        chance += seen[overlap] * (seen[-1] - seen[lags]) / overlap**2
    spread = 1.0 - chance
    # In a sequence of one category every operation is a repetition.
    return np.where(spread > 1e-9, (share - chance) / np.maximum(spread, 1e-9), 1.0)


def _starts(codes: IntArray, lag: int) -> list[int]:
    """Return where iterations start: at a category that occurs once in each, if there is one.

    Following one category stays in step if other operations intervene (a validation, a log).
    Without such a category every `lag`-th operation is a start.
    """
    num_iterations = len(codes) / lag
    once = [
        int(np.flatnonzero(codes == kind)[0])
        for kind, count in Counter(codes.tolist()).items()
        if abs(count - num_iterations) <= 0.1 * num_iterations
    ]
    if once:
        # Of the categories that occur once, the one that comes first.
        return np.flatnonzero(codes == codes[min(once)]).tolist()
    return list(range(len(codes) % lag, len(codes), lag))
