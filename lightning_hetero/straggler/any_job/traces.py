"""Read communication operations from recordings of other tools: torch's profiler, NCCL's recorder.

- **torch profiler, Chrome JSON** (`export_chrome_trace`; `.json` or `.json.gz`). Complete events
  (`ph` "X") whose name begins with `nccl:`, `gloo:`, `mpi:` or `c10d::`, or is
  `record_param_comms`. Read: `name`, `ts` (µs), `dur`, and of `args`: `Collective name`,
  `In msg nelems`, `dtype`, `Process Group Name`, `Input Dims`. One backend call shows up under
  several of these names, so only the family found first in that order is taken.
- **NCCL flight recorder** (`TORCH_NCCL_TRACE_BUFFER_SIZE`, `TORCH_FR_BUFFER_SIZE`), JSON or pickle.
  Read of `entries`: `profiling_name`, `time_created_ns`, `input_sizes`, `input_dtypes`,
  `process_group`. A pickle may hold plain dicts, lists, strings and numbers only, as the recorder
  writes them: anything that names a class or function is refused before it could run.
"""

import gzip
import io
import math
import pickle
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.reading import parse_json, show
from lightning_hetero.straggler.any_job.period import CommunicationOp

__all__ = ["read_content", "read_flight_recorder", "read_profiler_trace"]

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


def read_profiler_trace(path: str | Path) -> tuple[CommunicationOp, ...]:
    """Return the communication operations of a torch profiler trace of one rank, oldest first.

    Raises:
        ConfigurationError: The file is no Chrome trace, or holds no communication.
    """
    data = _parse(read_content(path), path)
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
    content = read_content(path)
    data = _parse(content, path) if content[:1] in b"{[" else _unpickle(content, path)
    entries = data.get("entries") if isinstance(data, Mapping) else None
    if not isinstance(entries, list | tuple):
        raise ConfigurationError(f"{path} has no list of entries; give a flight-recorder dump.")
    return _sorted(_from_entry(entry, path) for entry in entries)


def _sorted(ops: Iterable[CommunicationOp]) -> tuple[CommunicationOp, ...]:
    return tuple(sorted(ops, key=lambda op: op.start_s))


def read_content(path: str | Path) -> bytes:
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
