"""Which bytes of a checkpoint make up the slice that a rank asks for, however both sides cut it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from lightning_hetero.checkpoint.manifest import WEIGHT, Scalar, SliceEntry, TensorEntry
from lightning_hetero.checkpoint.recovery_plan import FileRange
from lightning_hetero.core.errors import CheckpointError

__all__ = ["SliceNeed", "Span", "Target", "find_targets"]


@dataclass(frozen=True, slots=True)
class SliceNeed:
    """Rows [start, stop) of a parameter along `dim`, with their optimizer state."""

    parameter: str
    shape: tuple[int, ...]
    """Shape of the whole parameter in the model that asks."""
    dim: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file and where they go in a target."""

    range: FileRange
    offset: int


@dataclass(frozen=True, slots=True)
class Target:
    """One tensor to put together from byte ranges."""

    need: SliceNeed
    key: str
    """`WEIGHT` or the name of an optimizer state."""
    dtype: str
    shape: tuple[int, ...]
    """Shape of the bytes put end to end; rows of `dim` first if `by_rows`."""
    by_rows: bool
    dim: int
    """Dim along which the writer cut."""
    size_bytes: int
    spans: tuple[Span, ...]


def find_targets(
    need: SliceNeed, slices: Sequence[tuple[int, SliceEntry]]
) -> tuple[list[Target], Mapping[str, Scalar]]:
    """Return the tensors that make up a needed slice, and its plain optimizer state.

    Args:
        need: The slice.
        slices: (part, entry) of every stored slice of this parameter.

    Raises:
        CheckpointError: The parameter isn't stored, has another shape, has gaps, or has state that
            can't be cut and was saved for other rows.
    """
    if not slices:
        raise CheckpointError(
            f"The checkpoint has no parameter {need.parameter}. It was saved from another model."
        )
    for _, entry in slices:
        if tuple(entry.shape) != need.shape:
            raise CheckpointError(
                f"Parameter {need.parameter} has shape {entry.shape} in the checkpoint but "
                f"{need.shape} in the model. Give the model that was saved, or another folder."
            )
    ordered = sorted(slices, key=lambda pair: (pair[1].start, pair[0]))
    dim = ordered[0][1].dim
    start, stop = (need.start, need.stop) if dim == need.dim else (0, _num_rows(need.shape, dim))
    overlapping = [p for p in ordered if p[1].start < stop and p[1].stop > start]
    keys = dict.fromkeys(t.key for _, entry in overlapping for t in entry.tensors)
    targets = [_target(need, key, overlapping, start, stop) for key in keys or [WEIGHT]]
    return targets, overlapping[0][1].scalars


def _target(
    need: SliceNeed, key: str, slices: Sequence[tuple[int, SliceEntry]], start: int, stop: int
) -> Target:
    stored = [
        (part, entry, tensor)
        for part, entry in slices
        for tensor in entry.tensors
        if tensor.key == key
    ]
    dtypes = {tensor.dtype for _, _, tensor in stored}
    if len(dtypes) > 1:
        raise CheckpointError(
            f"{need.parameter}/{key} is stored as {sorted(dtypes)}; all its slices must have one "
            "dtype."
        )
    if stored and not stored[0][2].by_rows:
        return _whole_target(need, key, stored)
    return _row_target(need, key, stored, start, stop)


def _row_target(
    need: SliceNeed,
    key: str,
    stored: Sequence[tuple[int, SliceEntry, TensorEntry]],
    start: int,
    stop: int,
) -> Target:
    """Sweep over the rows, taking the slice that reaches farthest."""
    spans: list[Span] = []
    position, offset, first = start, 0, None
    while position < stop:
        found = [item for item in stored if item[1].start <= position < item[1].stop]
        if not found:
            raise CheckpointError(
                f"The checkpoint has no rows {position} and on of {need.parameter}/{key} "
                f"{need.shape}; rows [{start}, {stop}) are needed."
            )
        part, entry, tensor = max(found, key=lambda item: (item[1].stop, -item[0]))
        first = first or (entry, tensor)
        row_bytes = (tensor.end - tensor.begin) // (entry.stop - entry.start)
        until = min(stop, entry.stop)
        begin = tensor.begin + (position - entry.start) * row_bytes
        end = begin + (until - position) * row_bytes
        spans.append(Span(FileRange(part, tensor.file, begin, end), offset))
        offset += end - begin
        position = until
    if first is None:
        raise CheckpointError(
            f"Rows [{start}, {stop}) of {need.parameter} are none at all. Ask for one or more."
        )
    entry, tensor = first
    shape = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
    return Target(need, key, tensor.dtype, shape, True, entry.dim, offset, tuple(spans))


def _whole_target(
    need: SliceNeed, key: str, stored: Sequence[tuple[int, SliceEntry, TensorEntry]]
) -> Target:
    """Take state that can't be cut: a count from any slice, anything else from the same rows."""
    for part, entry, tensor in stored:
        same = (entry.dim, entry.start, entry.stop) == (need.dim, need.start, need.stop)
        # A cut of the whole parameter is the same one along any dim.
        everything = _is_whole(entry.start, entry.stop, entry.shape, entry.dim) and _is_whole(
            need.start, need.stop, need.shape, need.dim
        )
        if same or everything or prod(tensor.shape) == 1:
            size = tensor.end - tensor.begin
            span = Span(FileRange(part, tensor.file, tensor.begin, tensor.end), 0)
            return Target(need, key, tensor.dtype, tensor.shape, False, entry.dim, size, (span,))
    cuts = sorted({(entry.start, entry.stop) for _, entry, _ in stored})
    raise CheckpointError(
        f"Optimizer state {key!r} of {need.parameter} was saved for rows {cuts} and "
        f"can't be cut into rows [{need.start}, {need.stop}). Use ownership='parameter' for "
        "optimizers whose state isn't element by element, or the plan that saved it."
    )


def _num_rows(shape: tuple[int, ...], dim: int) -> int:
    return shape[dim] if shape else 1


def _is_whole(start: int, stop: int, shape: tuple[int, ...], dim: int) -> bool:
    return start == 0 and stop == _num_rows(shape, dim)
