"""Encode a snapshot as safetensors files, chunk by chunk, with the cut dim of each tensor first.

The header is written here, because the safetensors package needs all tensors of a file at once,
whereas this needs one chunk. The package can read the files.
"""

import io
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_hetero.checkpoint.content import CheckpointContent, SliceContent
from lightning_hetero.checkpoint.manifest import (
    BLOCK_BYTES,
    SHARED_METADATA,
    WEIGHT,
    BlockChecksums,
    Buffer,
    FileEntry,
    PartManifest,
    SliceEntry,
    TensorEntry,
    name_of_unit,
    rank_metadata_name,
)
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.process import installed_version

SAFETENSORS_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in safetensors."""
DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
"""Spelling of each dtype in safetensors."""

_CHUNK_BYTES = 4 << 20


class FileBody:
    """The bytes of a file, which lie in several pieces of memory; can be iterated several times.

    Args:
        name: Name inside the checkpoint's folder.
        unit: The unit it belongs to, None for metadata.
        pieces: The bytes, in order.
    """

    def __init__(self, name: str, unit: int | None, pieces: Sequence[Buffer]) -> None:
        self.name = name
        self.unit = unit
        self.block_bytes = BLOCK_BYTES
        """Bytes that one checksum covers."""
        self._pieces = [memoryview(piece).toreadonly() for piece in pieces]
        self._checksums: tuple[int, ...] | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole file."""
        return sum(map(len, self._pieces))

    def __iter__(self) -> Iterator[Buffer]:
        checksums = BlockChecksums(self.block_bytes)
        for piece in self._pieces:
            for start in range(0, len(piece), _CHUNK_BYTES):
                chunk = piece[start : start + _CHUNK_BYTES]
                checksums.update(chunk)
                yield chunk
        self._checksums = checksums.finish()

    def entry(self) -> FileEntry:
        """Return the manifest's entry; computes checksums unless a write has done so."""
        if self._checksums is None:
            for _ in self:
                pass
        assert self._checksums is not None
        return FileEntry(self.name, self.unit, self.size_bytes, self._checksums)

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop)."""
        stop = self.size_bytes if stop is None else stop
        found, offset = [], 0
        for piece in self._pieces:
            found.append(piece[max(0, start - offset) : max(0, stop - offset)])
            offset += len(piece)
        return b"".join(found)


def encode_part(
    content: CheckpointContent, metadata: Mapping[str, bytes], *, block_bytes: int | None = None
) -> tuple[list[FileBody], list[SliceEntry]]:
    """Return the files of a part and the manifest's entries of its slices.

    Args:
        content: The state, in host memory.
        metadata: Names and contents of the metadata files, at least one.
        block_bytes: Bytes that one checksum covers; `BLOCK_BYTES` if None.
    """
    bodies = [FileBody(name, None, [data]) for name, data in metadata.items()]
    files: dict[tuple[int, bool], list[tuple[int, str, torch.Tensor]]] = defaultdict(list)
    for index, item in enumerate(content.slices):
        for key, tensor in item.tensors.items():
            files[item.unit, key != WEIGHT].append((index, key, tensor))
    entries: list[list[TensorEntry]] = [[] for _ in content.slices]
    for (unit, is_state), tensors in sorted(files.items()):
        kind = "optimizer" if is_state else "weights"
        part = f"{name_of_unit(unit, content.num_layers)}.part-{content.global_rank:05d}"
        found = [(content.slices[index], key, tensor) for index, key, tensor in tensors]
        body, made = _encode_file(f"{part}.{kind}.safetensors", unit, found)
        bodies.append(body)
        for (index, _, _), entry in zip(tensors, made, strict=True):
            entries[index].append(entry)
    for body in bodies:
        body.block_bytes = block_bytes or BLOCK_BYTES
    slices = [
        SliceEntry(
            parameter=item.parameter,
            unit=item.unit,
            shape=tuple(item.shape),
            dim=item.dim,
            start=item.start,
            stop=item.stop,
            scalars=dict(item.scalars),
            tensors=tuple(found),
        )
        for item, found in zip(content.slices, entries, strict=True)
    ]
    return bodies, slices


def make_manifest(
    content: CheckpointContent,
    bodies: Sequence[FileBody],
    slices: Sequence[SliceEntry],
    *,
    with_checksums: bool = True,
) -> PartManifest:
    """Return the manifest of a part, whose files have been written or are read from memory."""
    return PartManifest(
        id=content.id,
        part=content.global_rank,
        world_size=content.world_size,
        num_layers=content.num_layers,
        block_bytes=bodies[0].block_bytes,
        files=tuple(
            body.entry() if with_checksums else FileEntry(body.name, body.unit, body.size_bytes, ())
            for body in bodies
        ),
        slices=tuple(slices),
        plan=None if content.plan is None else content.plan.to_dict(),
        versions=_versions(),
    )


def metadata_files(
    content: CheckpointContent, *, with_shared: bool | None = None
) -> dict[str, bytes]:
    """Return a part's metadata files by name; those about all ranks are in rank 0's part only.

    Raises:
        CheckpointError: See `encode_metadata`.
    """
    name = rank_metadata_name(content.global_rank)
    files = {name: encode_metadata(content.rank_metadata, what="rank_metadata")}
    if content.global_rank == 0 if with_shared is None else with_shared:
        files[SHARED_METADATA] = encode_metadata(content.metadata, what="metadata")
    return files


def encode_metadata(metadata: Mapping[str, Any], *, what: str) -> bytes:
    """Return metadata as a file that `torch.load(weights_only=True)` reads.

    Raises:
        CheckpointError: Some entry holds objects that would have to be pickled.
    """
    data = _save(dict(metadata))
    why = _load_error(data)
    if why is not None:
        bad = [key for key, value in metadata.items() if _load_error(_save(value)) is not None]
        raise CheckpointError(
            f"{what} entry {bad} holds objects that torch.load(weights_only=True) refuses: {why}. "
            "Keep to tensors, numbers, texts, lists and dicts."
        )
    return data


def _save(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _load_error(data: bytes) -> str | None:
    try:
        torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:
        return str(error).splitlines()[0]
    return None


def _encode_file(
    name: str, unit: int, tensors: Sequence[tuple[SliceContent, str, torch.Tensor]]
) -> tuple[FileBody, list[TensorEntry]]:
    """Return one file's body, and an entry for each of its tensors."""
    header: dict[str, Any] = {}
    cuts: dict[str, Any] = {}
    pieces: list[Buffer] = []
    found: list[TensorEntry] = []
    end = 0
    for item, key, tensor in tensors:
        full_key = item.parameter if key == WEIGHT else f"{item.parameter}/{key}"
        if full_key in header:  # Several intervals of rows of one parameter.
            full_key = f"{full_key}@{item.start}"
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"{full_key} has dtype {tensor.dtype}, which checkpoints don't keep. Use one of "
                f"{[str(dtype) for dtype in DTYPE_NAMES]}."
            )
        rows, dtype = tensor.movedim(item.first_dim(key), 0), DTYPE_NAMES[tensor.dtype]
        pieces.append(rows.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        begin, end = end, end + tensor.numel() * tensor.element_size()
        shape = tuple(rows.shape)
        header[full_key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        cuts[item.parameter] = {"shape": item.shape, "cut": [item.dim, item.start, item.stop]}
        found.append(TensorEntry(key, name, dtype, shape, item.is_by_rows(key), begin, end))
    # For people who look into the file: the dim and rows [start, stop) of each tensor, whose first
    # dim is that dim.
    header = {"__metadata__": {"rows": json.dumps(cuts)}, **header}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    prefix = len(text).to_bytes(8, "little") + text
    entries = [
        replace(entry, begin=len(prefix) + entry.begin, end=len(prefix) + entry.end)
        for entry in found
    ]
    return FileBody(name, unit, [prefix, *pieces]), entries


def _versions() -> dict[str, str]:
    packages = ("lightning-hetero", "lightning", "torch", "safetensors")
    return {package: installed_version(package) for package in packages}
