"""Find the bytes of a checkpoint that make up the slices a rank needs, and assemble them.

A rank needs rows of parameters, whatever the plan, the world size, the ownership and
the tensor-parallel degree. The parts of a checkpoint have rows of parameters, too, and what a rank
needs of a part is the overlap (AutoHet §IV-B.2, Figure 6). Example: a rank needs rows 0 to 5; part
0 has rows 0 to 3, part 1 rows 4 to 7: it reads all rows of part 0, and rows 4 and 5 of part 1.

Stored tensors have their cut dim first, so an overlap is one range of bytes. If the reader cuts
along another dim than the writer did, it reads all rows and cuts them itself. Tensors are filled
chunk by chunk, in any order.
"""

import io
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from lightning_hetero.checkpoint.content import (
    RestoredSlice,
    SliceNeed,
    num_rows,
    refuse_nonfinite,
)
from lightning_hetero.checkpoint.encoding import SAFETENSORS_DTYPES
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

CHUNK_BYTES = 16 << 20
"""Most bytes of one fetch, which sender and receiver hold in memory."""

_Stored = Sequence[tuple[int, SliceEntry, TensorEntry]]
"""All stored slices of one tensor of a parameter, such as its "exp_avg", as (part, slice, tensor).
Those of this rank's own part come first."""


@dataclass(frozen=True, order=True, slots=True)
class FileRange:
    """Bytes [start, stop) of one file of one part."""

    part: int
    file: str
    start: int
    stop: int


class Assembly:
    """The slices and metadata files that one rank needs of a checkpoint, with buffers for them.

    1. `ranges` says what to fetch, and `deliver` takes it.
    2. `finish` returns the slices.

    Args:
        needs: The slices. Optional ones are left out if the checkpoint doesn't have them.
        manifests: The manifests of all parts.
        own_part: The part that this rank itself saved, or holds; None if it has none.

    Raises:
        CheckpointError: A parameter isn't stored, has another shape, has gaps, or has state that
            can't be cut and was saved for other rows.
    """

    def __init__(
        self,
        needs: Sequence[SliceNeed],
        manifests: Mapping[int, PartManifest],
        own_part: int | None,
    ) -> None:
        self._manifests = manifests
        self._own_part = own_part
        self._wanted: dict[tuple[int, str], list[tuple[int, int, memoryview]]] = defaultdict(list)
        """For each (part, file) the byte ranges that are needed, and where each goes."""
        stored: dict[str, list[tuple[int, SliceEntry]]] = defaultdict(list)
        for part, manifest in sorted(manifests.items()):
            for entry in manifest.slices:
                stored[entry.parameter].append((part, entry))
        self._slices = [
            (need, *self._plan(need, stored[need.parameter]))
            for need in needs
            if need.parameter in stored or not need.is_optional
        ]
        with_metadata = [p for p, m in sorted(manifests.items()) if m.has_file(SHARED_METADATA)]
        shared = own_part if own_part in with_metadata else min(with_metadata, default=0)
        self._metadata = self._whole_file(shared, SHARED_METADATA)
        self._rank_metadata = (
            None if own_part is None else self._whole_file(own_part, rank_metadata_name(own_part))
        )

    def ranges(self) -> Iterator[FileRange]:
        """Yield what to fetch: whole blocks, each once, at most `CHUNK_BYTES` or one block each."""
        for (part, file), wanted in sorted(self._wanted.items(), key=lambda item: item[0]):
            manifest = self._manifests[part]
            size, block = manifest.file(file).size_bytes, manifest.block_bytes
            runs: list[tuple[int, int]] = []
            for begin, end in sorted((begin, end) for begin, end, _ in wanted):
                start, stop = begin - begin % block, min(size, -(-end // block) * block)
                if runs and start <= runs[-1][1]:
                    start, stop = runs[-1][0], max(stop, runs.pop()[1])
                runs.append((start, stop))
            step = max(1, CHUNK_BYTES // block) * block
            for start, stop in runs:
                for first in range(start, stop, step):
                    yield FileRange(part, file, first, min(first + step, stop))

    def deliver(self, item: FileRange, data: Buffer) -> None:
        """Copy the bytes of a fetched range to all tensors that need them.

        Several threads may call it at once.
        """
        source = memoryview(data)
        for begin, end, target in self._wanted[item.part, item.file]:
            low, high = max(begin, item.start), min(end, item.stop)
            if low < high:
                target[low - begin : high - begin] = source[low - item.start : high - item.start]

    def finish(
        self,
    ) -> tuple[tuple[RestoredSlice, ...], Mapping[str, Any], Mapping[str, Any] | None]:
        """Return the slices, the shared metadata and the rank's own, after all was delivered."""
        slices = []
        for need, views, scalars in self._slices:
            tensors = {
                key: _rows_of(view, need) if is_to_be_cut else view.contiguous()
                for key, (view, is_to_be_cut) in views.items()
            }
            slices.append(
                RestoredSlice(
                    parameter=need.parameter,
                    weight=tensors.pop(WEIGHT),
                    state=tensors,
                    scalars=scalars,
                )
            )
        refuse_nonfinite(slices, "in the checkpoint")
        own = None if self._rank_metadata is None else _load(self._rank_metadata)
        return tuple(slices), _load(self._metadata), own

    def _plan(
        self, need: SliceNeed, slices: Sequence[tuple[int, SliceEntry]]
    ) -> tuple[dict[str, tuple[torch.Tensor, bool]], Mapping[str, Scalar]]:
        """Return the slice's tensors, by key, and its plain state.

        The tensors are views of buffers that will be filled. With each goes whether the needed rows
        must still be cut out of it.
        """
        if not slices:
            raise CheckpointError(
                f"The checkpoint has no parameter {need.parameter}. It was saved from another "
                "model."
            )
        for _, entry in slices:
            if tuple(entry.shape) != need.shape:
                raise CheckpointError(
                    f"Parameter {need.parameter} has shape {entry.shape} in the checkpoint but "
                    f"{need.shape} in the model. Give the model that was saved, or another folder."
                )
        ordered = sorted(slices, key=lambda pair: (pair[1].start, pair[0]))
        dim = ordered[0][1].dim
        is_same_dim = dim == need.dim
        rows = need.rows if is_same_dim else ((0, num_rows(need.shape, dim)),)
        found = [
            pair
            for pair in ordered
            if any(pair[1].start < stop and pair[1].stop > start for start, stop in rows)
        ]
        keys = dict.fromkeys(tensor.key for _, entry in found for tensor in entry.tensors)
        found.sort(key=lambda pair: pair[0] != self._own_part)
        views = {}
        for key in keys or [WEIGHT]:
            stored = [(p, e, tensor) for p, e in found for tensor in e.tensors if tensor.key == key]
            if stored and not stored[0][2].by_rows:
                views[key] = self._whole_tensor(need, key, stored), False
            else:
                view = self._cover(need, key, stored, rows)
                views[key] = view.movedim(0, dim) if view.ndim else view, not is_same_dim
        return views, found[0][1].scalars

    def _cover(
        self, need: SliceNeed, key: str, stored: _Stored, rows: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """Return the rows in order, each run from the own part or else the longest slice."""
        pieces = []
        for start, stop in rows:
            position = start
            while position < stop:
                having = [item for item in stored if item[1].start <= position < item[1].stop]
                if not having:
                    raise CheckpointError(
                        f"No part has rows from {position} on of {need.parameter}/{key} "
                        f"{need.shape}; rows [{start}, {stop}) are needed."
                    )
                part, entry, tensor = max(
                    having, key=lambda item: (item[0] == self._own_part, item[1].stop, -item[0])
                )
                row_bytes = (tensor.end - tensor.begin) // (entry.stop - entry.start)
                until = min(stop, entry.stop)
                begin, end = (
                    tensor.begin + (row - entry.start) * row_bytes for row in (position, until)
                )
                pieces.append(FileRange(part, tensor.file, begin, end))
                position = until
        num = sum(stop - start for start, stop in rows)
        shape = (num, *tensor.shape[1:]) if tensor.shape else ()
        return self._buffer(pieces).view(SAFETENSORS_DTYPES[tensor.dtype]).reshape(shape)

    def _whole_tensor(self, need: SliceNeed, key: str, stored: _Stored) -> torch.Tensor:
        """Return state that can't be cut.

        It is one number, the same in every slice, or it was saved for exactly the needed rows.
        """
        for part, entry, tensor in stored:
            if need.is_just(entry.dim, entry.start, entry.stop) or prod(tensor.shape) == 1:
                buffer = self._buffer([FileRange(part, tensor.file, tensor.begin, tensor.end)])
                return buffer.view(SAFETENSORS_DTYPES[tensor.dtype]).reshape(tensor.shape)
        cuts = sorted({(entry.start, entry.stop) for _, entry, _ in stored})
        raise CheckpointError(
            f"Optimizer state {key!r} of {need.parameter} was saved for rows {cuts} and "
            f"can't be cut into rows {list(need.rows)}. Use ownership='parameter' for "
            "optimizers whose state isn't element by element, or the plan that saved it."
        )

    def _buffer(self, pieces: Sequence[FileRange]) -> torch.Tensor:
        """Return a buffer that the pieces will fill, end to end."""
        buffer = torch.empty(sum(item.stop - item.start for item in pieces), dtype=torch.uint8)
        rest = buffer.numpy().data
        for item in pieces:
            size = item.stop - item.start
            self._wanted[item.part, item.file].append((item.start, item.stop, rest[:size]))
            rest = rest[size:]
        return buffer

    def _whole_file(self, part: int, name: str) -> torch.Tensor:
        size = self._manifests[part].file(name).size_bytes
        return self._buffer([FileRange(part, name, 0, size)])


def _rows_of(view: torch.Tensor, need: SliceNeed) -> torch.Tensor:
    pieces = [view.narrow(need.dim, start, stop - start) for start, stop in need.rows]
    return torch.cat(pieces, need.dim) if len(pieces) > 1 else pieces[0].contiguous()


def _load(buffer: torch.Tensor) -> Mapping[str, Any]:
    stream = io.BytesIO(buffer.numpy().tobytes())
    loaded: Mapping[str, Any] = torch.load(stream, weights_only=True, map_location="cpu")
    return loaded
