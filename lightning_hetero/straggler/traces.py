"""Read an operation trace: one row for each operation of each rank and step.

Columns: `step`, `rank`, `dp_rank` (the pipeline), `stage`, `optype`, `start_ts` and `duration` in
seconds, `mb_id` (the micro-batch), and optionally `mc` (the chunk of an interleaved schedule). The
format is Parquet (with pyarrow installed) or JSON lines, plain or compressed by gzip; or a folder
of such files, one for each rank, as `TraceOperations` writes them.
"""

import contextlib
import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from lightning_hetero.core.arrays import BoolArray, FloatArray, IntArray
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.reading import build, readable

_Array = TypeVar("_Array", IntArray, FloatArray)

_LONGEST_FORWARD_S = 20.0
"""A trace in which a forward takes longer has its times in milliseconds or smaller units."""
_NEEDED = ("step", "rank", "dp_rank", "stage", "optype", "start_ts", "duration", "mb_id")


@dataclass(frozen=True)
class OperationTrace:
    """The columns of a trace, sorted by step, rank and start."""

    step: IntArray
    rank: IntArray
    pipeline: IntArray
    stage: IntArray
    chunk: IntArray
    microbatch: IntArray
    kind: IntArray
    """Index into `kinds`."""
    kinds: tuple[str, ...]
    start_s: FloatArray
    end_s: FloatArray
    unit_s: float = 1.0
    """The unit in which the trace gave times, in seconds."""
    num_left_out: int = 0
    """Number of the trace's steps that are incomplete."""

    @classmethod
    def from_columns(cls, columns: dict[str, Any]) -> "OperationTrace":
        """Make a trace of columns by name.

        Raises:
            ConfigurationError: A column is missing, or no step is complete.
        """
        missing = [name for name in _NEEDED if name not in columns]
        if missing:
            raise ConfigurationError(
                f"The trace has no column {', '.join(missing)}. It has "
                f"{', '.join(columns) or 'none'}; an operation trace needs {', '.join(_NEEDED)}."
            )
        if not len(columns["step"]):
            raise ConfigurationError("The trace holds no operation.")
        start, duration = (_numbers(columns, name, float) for name in ("start_ts", "duration"))
        unit_s = _unit_s(duration, np.asarray(columns["optype"], str) == "forward-compute")
        start, end = start * unit_s, (start + duration) * unit_s
        if not np.isfinite(end).all() or (end < start).any():
            raise ConfigurationError("A start or duration in the trace is negative or not finite.")
        step, rank, pipeline, stage, microbatch = (
            _numbers(columns, name, np.int64) for name in (*_NEEDED[:4], "mb_id")
        )
        if min(int(column.min()) for column in (rank, pipeline, stage)) < 0:
            raise ConfigurationError("A rank, dp_rank or stage in the trace is below 0.")
        chunk = np.maximum(_numbers({"mc": step * 0, **columns}, "mc", np.int64), 0)
        kinds, kind = np.unique(np.asarray(columns["optype"], str), return_inverse=True)
        # Where each pipeline is one rank, its stages send nothing.
        has_stages = len(np.unique(stage)) > 1 and len(np.unique(rank)) > len(np.unique(pipeline))
        _check_kinds(set(map(str, kinds)), has_stages=has_stages)
        order = np.lexsort((end, start, rank, step))
        is_of = {str(name): kind == index for index, name in enumerate(kinds)}
        order = order[_are_complete(step, pipeline, stage, chunk, is_of)[order]]
        return cls(
            step=np.unique(step[order], return_inverse=True)[1],
            rank=rank[order],
            pipeline=pipeline[order],
            stage=stage[order],
            chunk=chunk[order],
            microbatch=microbatch[order],
            kind=kind[order],
            kinds=tuple(map(str, kinds)),
            start_s=start[order],
            end_s=end[order],
            unit_s=unit_s,
            num_left_out=len(np.unique(step)) - len(np.unique(step[order])),
        )

    def __len__(self) -> int:
        return len(self.step)

    def with_barriers(self, behind: IntArray) -> Self:
        """Return the trace with barriers at its end, each in the place of the operation behind it.

        Their kinds are called "barrier before" that operation's.
        """
        columns: dict[str, Any] = {
            name: np.r_[column, column[behind]]
            for name, column in vars(self).items()
            if isinstance(column, np.ndarray)
        }
        columns["kind"][len(self) :] += len(self.kinds)
        kinds = (*self.kinds, *(f"barrier before {kind}" for kind in self.kinds))
        return replace(self, kinds=kinds, **columns)

    def are(self, *kinds: str) -> BoolArray:
        """Return which operations are of one of the kinds."""
        return np.isin(self.kind, [i for i, kind in enumerate(self.kinds) if kind in kinds])


def _numbers(columns: dict[str, Any], name: str, dtype: Any) -> Any:
    try:
        return np.asarray(columns[name], dtype)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"Column {name} has a value that isn't a number.") from error


def _unit_s(duration: FloatArray, is_forward: BoolArray) -> float:
    """Return the unit of a trace's times, in seconds: the largest in which forwards are short."""
    forward = float(np.median(duration[is_forward])) if is_forward.any() else 0.0
    return next((unit for unit in (1.0, 1e-3, 1e-6) if forward * unit <= _LONGEST_FORWARD_S), 1e-9)


def _are_complete(
    step: IntArray,
    pipeline: IntArray,
    stage: IntArray,
    chunk: IntArray,
    kinds: dict[str, BoolArray],
) -> BoolArray:
    """Return which operations are of complete steps: no log ended early, and no row was lost.

    Raises:
        ConfigurationError: No step is complete.
    """
    steps, step = np.unique(step, return_inverse=True)
    run, num_stages = grouped(step, pipeline), int(stage.max()) + 1
    lacks = np.zeros(int(run.max()) + 1, bool)

    def counts(name: str, to: IntArray) -> IntArray:
        place = run * num_stages + to % num_stages
        number = np.bincount(place[kinds.get(name, step < 0)], minlength=len(lacks) * num_stages)
        return number.reshape(len(lacks), num_stages)

    for name, hop in (("forward", 1), ("backward", -1)):
        sent, received = counts(f"{name}-send", stage + hop), counts(f"{name}-recv", stage)
        lacks |= (sent != received).any(axis=1)
    for part in np.unique(chunk).tolist():
        for name in ("forward-compute", "backward-compute"):
            kinds["part"] = kinds.get(name, step < 0) & (chunk == part)
            number = counts("part", stage)
            lacks |= ((number > 0) & (number < number.max(axis=1, keepdims=True))).any(axis=1)
    is_complete: BoolArray = ~np.isin(step, step[lacks[run]])
    if not is_complete.any():
        raise ConfigurationError(
            f"None of the trace's {len(steps)} steps is complete: stages of a pipeline have "
            "different numbers of forwards or backwards, or sends without receives. Give all rows "
            "of one rank of each stage."
        )
    return is_complete


def _check_kinds(kinds: set[str], *, has_stages: bool) -> None:
    """Refuse a trace in which waiting can't be told from the work of others.

    Raises:
        ConfigurationError: It is one.
    """
    needed = {"forward-compute"}
    if has_stages:
        needed |= {"forward-send", "forward-recv"}
        if "backward-compute" in kinds:
            needed |= {"backward-send", "backward-recv"}
    if not needed <= kinds:
        raise ConfigurationError(
            f"The trace has no {' and no '.join(sorted(needed - kinds))}, without which nobody can "
            f"say who waited for whom. It has {', '.join(sorted(kinds))}."
        )


def grouped(*keys: IntArray) -> IntArray:
    """Return a number for each combination of keys, from 0."""
    number = np.zeros(len(keys[0]), np.int64)
    for key in keys:
        _, values = np.unique(key, return_inverse=True)
        number = number * (int(values.max(initial=0)) + 1) + values
    numbers: IntArray = np.unique(number, return_inverse=True)[1]
    return numbers


def low_median(values: FloatArray, group: IntArray) -> FloatArray:
    """Return the lower median of each group."""
    order = np.lexsort((values, group))
    sizes = np.bincount(group)
    first = np.cumsum(sizes) - sizes
    medians: FloatArray = values[order[first + (sizes - 1) // 2]]
    return medians


def groups_of(part: IntArray, whole: _Array) -> _Array:
    """Return what each group has, given the group of every operation and what that has."""
    found = np.empty(int(part.max(initial=-1)) + 1, whole.dtype)
    found[part] = whole
    return found


@readable
class Layout:
    """The layout of the job, as far as it is known."""

    tp_size: int = 1
    """Number of devices that each rank of the trace stands for."""
    layers: tuple[int, ...] = ()
    """Layers of each stage."""
    nodes: Mapping[int, str] = field(default_factory=dict)
    """The node of each rank."""

    @classmethod
    def from_dict(cls, entry: object) -> "Layout":
        """Read `tp_size`, `layers` and `nodes`, each of which may be missing; ignore other keys.

        Raises:
            ConfigurationError: It isn't a layout.
        """
        if isinstance(entry, Mapping):
            entry = {item.name: entry[item.name] for item in fields(cls) if item.name in entry}
        return build(cls, entry, "layout", ConfigurationError)


def trace_files(folder: Path) -> list[Path]:
    """Return the files of one trace that `TraceOperations` wrote to a folder."""
    return sorted(folder.glob("operations-rank*.jsonl.gz"))


def read_operations(path: Path) -> OperationTrace:
    """Read a trace from a file, or from the files of all ranks in a folder.

    Raises:
        ConfigurationError: The file can't be read, or isn't an operation trace.
    """
    files = trace_files(path) if path.is_dir() else [path]
    if not files:
        raise ConfigurationError(f"The folder {path} holds no file that TraceOperations wrote.")
    try:
        parts = [_parquet(p) if p.suffix == ".parquet" else _json_lines(p) for p in files]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return OperationTrace.from_columns(columns)
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise ConfigurationError(f"Can't read the operation trace {path}: {error}") from error


def _parquet(path: Path) -> dict[str, Any]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigurationError(
            "Reading Parquet needs pyarrow: pip install 'lightning-hetero[report]'."
        ) from error
    try:
        table = parquet.read_table(path)
    except ArrowException as error:
        raise ConfigurationError(f"Can't read {path} as Parquet: {error}") from error
    return {name: table[name].to_numpy() for name in table.column_names if name in {*_NEEDED, "mc"}}


def _json_lines(path: Path) -> dict[str, Any]:
    rows = []
    # A compressed file is incomplete if the job was killed while it wrote.
    with (
        gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file,
        contextlib.suppress(EOFError),
    ):
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except ValueError as error:
                    raise ConfigurationError(f"Line {number} isn't JSON: {error}") from error
    names = [name for name in (*_NEEDED, "mc") if rows and name in rows[0]]
    return {name: [row[name] for row in rows] for name in names}
