"""Find the bytes of a checkpoint that make up the slices a rank needs, and assemble them.

A rank needs rows [start, stop) of parameters, whatever the plan, the world size, the ownership and
the tensor-parallel degree. The parts of a checkpoint have rows of parameters, too, and what a rank
needs of a part is the overlap (AutoHet §IV-B.2, Figure 6). Example: a rank needs rows 0 to 5; part
0 has rows 0 to 3, part 1 rows 4 to 7: it reads all rows of part 0, and rows 4 and 5 of part 1.

Stored tensors have their cut dim first, so an overlap is one byte range. A reader that cuts along
another dim than the writer reads all rows and cuts them itself. Tensors are filled chunk by chunk,
in any order.
"""

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from lightning_hetero.checkpoint.content import RestoredSlice, SliceNeed, num_rows, refuse_nonfinite
from lightning_hetero.checkpoint.encoding import SAFETENSORS_DTYPES
from lightning_hetero.checkpoint.fetching import FileRange, whole_blocks
from lightning_hetero.checkpoint.manifest import (
    SHARED_METADATA,
    WEIGHT,
    Buffer,
    PartManifest,
    Scalar,
    SliceEntry,
    TensorEntry,
    rank_metadata_name,
)
from lightning_hetero.core.errors import CheckpointError

__all__ = ["Assembly", "Span", "Target", "find_targets"]


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file, and their offset in a target."""

    range: FileRange
    offset: int


@dataclass(frozen=True, slots=True)
class Target:
    """One tensor to be assembled from byte ranges."""

    need: SliceNeed
    key: str
    """`WEIGHT` or the name of an optimizer state."""
    dtype: str
    shape: tuple[int, ...]
    """Shape of the assembled bytes; if `by_rows`, `dim` comes first."""
    by_rows: bool
    dim: int
    """Dim along which the writer cut."""
    size_bytes: int
    spans: tuple[Span, ...]


def find_targets(
    need: SliceNeed, slices: Sequence[tuple[int, SliceEntry]], own_part: int | None = None
) -> tuple[list[Target], Mapping[str, Scalar]]:
    """Return the tensors that make up a needed slice, and its plain optimizer state.

    Args:
        need: The slice.
        slices: (part, entry) of every stored slice of this parameter.
        own_part: The part that is preferred if several parts have a row.

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
    start, stop = (need.start, need.stop) if dim == need.dim else (0, num_rows(need.shape, dim))
    overlapping = [p for p in ordered if p[1].start < stop and p[1].stop > start]
    keys = dict.fromkeys(t.key for _, entry in overlapping for t in entry.tensors)
    overlapping.sort(key=lambda pair: pair[0] != own_part)  # The own part comes first.
    rows = start, stop
    targets = [_target(need, key, overlapping, rows, own_part) for key in keys or [WEIGHT]]
    return targets, overlapping[0][1].scalars


def _target(
    need: SliceNeed,
    key: str,
    slices: Sequence[tuple[int, SliceEntry]],
    rows: tuple[int, int],
    own_part: int | None,
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
    return _row_target(need, key, stored, rows, own_part)


def _row_target(
    need: SliceNeed,
    key: str,
    stored: Sequence[tuple[int, SliceEntry, TensorEntry]],
    rows: tuple[int, int],
    own_part: int | None,
) -> Target:
    """Cover the rows in order: by the own part, else by the slice that reaches furthest."""
    spans: list[Span] = []
    start, stop = rows
    position, offset, first = start, 0, None
    while position < stop:
        found = [item for item in stored if item[1].start <= position < item[1].stop]
        if not found:
            raise CheckpointError(
                f"Nobody has rows {position} and on of {need.parameter}/{key} "
                f"{need.shape}; rows [{start}, {stop}) are needed."
            )
        part, entry, tensor = max(
            found, key=lambda item: (item[0] == own_part, item[1].stop, -item[0])
        )
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
    """Take state that can't be cut: a single number from any slice, else from the same rows."""
    for part, entry, tensor in stored:
        if need.is_just(entry.dim, entry.start, entry.stop) or prod(tensor.shape) == 1:
            size = tensor.end - tensor.begin
            span = Span(FileRange(part, tensor.file, tensor.begin, tensor.end), 0)
            return Target(need, key, tensor.dtype, tensor.shape, False, entry.dim, size, (span,))
    cuts = sorted({(entry.start, entry.stop) for _, entry, _ in stored})
    raise CheckpointError(
        f"Optimizer state {key!r} of {need.parameter} was saved for rows {cuts} and "
        f"can't be cut into rows [{need.start}, {need.stop}). Use ownership='parameter' for "
        "optimizers whose state isn't element by element, or the plan that saved it."
    )


class Assembly:
    """The slices and metadata files that one rank needs of a checkpoint, with buffers for them.

    Args:
        needs: The slices. Optional ones are left out if the checkpoint doesn't have them.
        manifests: The manifests of all parts.
        own_part: The part that this rank itself saved, or holds; None if it has none.

    Raises:
        CheckpointError: See `find_targets`.
    """

    def __init__(
        self,
        needs: Sequence[SliceNeed],
        manifests: Mapping[int, PartManifest],
        own_part: int | None,
    ) -> None:
        stored: dict[str, list[tuple[int, SliceEntry]]] = defaultdict(list)
        for part, manifest in sorted(manifests.items()):
            for entry in manifest.slices:
                stored[entry.parameter].append((part, entry))
        self._manifests = manifests
        self._spans: dict[tuple[int, str], list[tuple[Span, memoryview]]] = defaultdict(list)
        self._slices = []
        for need in needs:
            if need.parameter in stored or not need.is_optional:
                targets, scalars = find_targets(need, stored[need.parameter], own_part)
                buffers = [self._register(it.size_bytes, it.spans) for it in targets]
                self._slices.append((need, list(zip(targets, buffers, strict=True)), scalars))
        with_metadata = [p for p, m in sorted(manifests.items()) if m.has_file(SHARED_METADATA)]
        shared = own_part if own_part in with_metadata else min(with_metadata, default=0)
        self._metadata = self._whole_file(shared, SHARED_METADATA)
        self._rank_metadata = (
            None if own_part is None else self._whole_file(own_part, rank_metadata_name(own_part))
        )

    def blocks(self) -> list[FileRange]:
        """Return the ranges to fetch: whole blocks, each byte once."""
        ranges = [span.range for spans in self._spans.values() for span, _ in spans]
        return whole_blocks(ranges, self._manifests)

    def deliver(self, item: FileRange, data: Buffer) -> None:
        """Copy the bytes of a fetched range into the buffers of all tensors that need them.

        Several threads may call it at once.
        """
        source = memoryview(data)
        for span, target in self._spans[item.part, item.file]:
            low, high = max(span.range.start, item.start), min(span.range.stop, item.stop)
            if low < high:
                to = span.offset + low - span.range.start
                target[to : to + high - low] = source[low - item.start : high - item.start]

    def finish(
        self,
    ) -> tuple[tuple[RestoredSlice, ...], Mapping[str, Any], Mapping[str, Any] | None]:
        """Return the slices, the shared metadata and the rank's own, after all was delivered."""
        slices = []
        for need, parts, scalars in self._slices:
            tensors = {target.key: _as_tensor(target, buffer) for target, buffer in parts}
            if WEIGHT not in tensors:
                raise CheckpointError(
                    f"The checkpoint has state but no weights of {need.parameter}. Delete it, and "
                    "go on from an older one."
                )
            weight = tensors.pop(WEIGHT)
            slices.append(
                RestoredSlice(
                    parameter=need.parameter, weight=weight, state=tensors, scalars=scalars
                )
            )
        own = None if self._rank_metadata is None else _load(self._rank_metadata)
        refuse_nonfinite(slices, "in the checkpoint")
        return tuple(slices), _load(self._metadata), own

    def _register(self, size_bytes: int, spans: Sequence[Span]) -> torch.Tensor:
        buffer = torch.empty(size_bytes, dtype=torch.uint8)
        view = buffer.numpy().data
        for span in spans:
            self._spans[span.range.part, span.range.file].append((span, view))
        return buffer

    def _whole_file(self, part: int, name: str) -> torch.Tensor:
        size = self._manifests[part].file(name).size_bytes
        return self._register(size, [Span(FileRange(part, name, 0, size), 0)])


def _as_tensor(target: Target, buffer: torch.Tensor) -> torch.Tensor:
    tensor = buffer.view(SAFETENSORS_DTYPES[target.dtype]).reshape(target.shape)
    if not target.by_rows or not target.shape:
        return tensor
    tensor = tensor.movedim(0, target.dim)
    need = target.need
    if need.dim != target.dim:
        tensor = tensor.narrow(need.dim, need.start, need.stop - need.start)
    return tensor.contiguous()


def _load(buffer: torch.Tensor) -> Mapping[str, Any]:
    stream = io.BytesIO(buffer.numpy().tobytes())
    loaded: Mapping[str, Any] = torch.load(stream, weights_only=True, map_location="cpu")
    return loaded
