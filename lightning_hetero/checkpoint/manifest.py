"""One rank's part of a checkpoint: its files, byte ranges and checksums.

A checkpoint is a folder `step-<step>-<attempt>-<run>`, to which every rank adds one *part*: for
each *unit* (a layer, or what lies before or after the layers) one safetensors file with the weights
that it owns and one with their optimizer state, small files with metadata, and last of all its
manifest. A part counts once it has a valid manifest, and a checkpoint is complete once the parts of
all ranks count (`tiers`). So no rank waits for another while it writes, and a folder that a crash
has left incomplete never looks complete (AutoHet §IV-B.1).

Rows of the cut dim come first in the stored tensors, so that any interval of rows, which is what
another plan or tensor-parallel degree asks for, is one byte range.
"""

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import total_ordering
from typing import Any, TypeAlias

from pydantic import TypeAdapter

from lightning_hetero.core.errors import CheckpointError

Buffer: TypeAlias = bytes | bytearray | memoryview

BLOCK_BYTES = 1 << 20
"""Bytes that one checksum covers: a partial read is rounded to at most two blocks more."""

SHARED_METADATA = "metadata.pt"
"""File with the metadata that are the same on all ranks; part 0 has it."""

Scalar = float | int | bool | str | None
"""Optimizer state that JSON can hold."""

WEIGHT = "weight"
"""Key of the slice itself among its tensors."""

_FORMAT = 1
_HEAD = b'{"crc32": "%08x", "manifest": '
_TAIL = b"}\n"
_BARE_NAME = re.compile(r"(?!(?:confirmed|rejected)$)[A-Za-z0-9_][A-Za-z0-9._-]*")
"""Matches names of files inside the checkpoint's folder. It excludes paths that lead out of the
folder, and the marker files `confirmed` and `rejected`."""


@total_ordering
@dataclass(frozen=True, slots=True)
class CheckpointId:
    """Identifies a checkpoint; ordered by age: by run, by attempt, then by step.

    So checkpoints of a later start, which has a higher attempt, are newer even at earlier steps.
    """

    step: int
    attempt: int = 0
    """Which start of the run saved it: parts of two starts at one step never mix."""
    run: str = ""
    """Identity of the run, made once (`new_run`); parts of two runs never meet."""

    def __lt__(self, other: "CheckpointId") -> bool:
        return (self.run, self.attempt, self.step) < (other.run, other.attempt, other.step)

    @property
    def folder(self) -> str:
        """Name of its folder in every tier."""
        name = f"step-{self.step:012d}-{self.attempt:06d}"
        return f"{name}-{self.run}" if self.run else name

    @classmethod
    def parse(cls, folder: str) -> "CheckpointId | None":
        """Return the checkpoint that a folder's name stands for; None if it isn't such a name."""
        match = re.fullmatch(r"step-(\d{12,20})-(\d{6,20})(?:-([0-9a-z-]{1,64}))?", folder)
        return None if match is None else cls(int(match[1]), int(match[2]), match[3] or "")

    def __str__(self) -> str:
        return f"step {self.step}" + (f" (attempt {self.attempt})" if self.attempt else "")


def manifest_name(checkpoint: CheckpointId, part: int) -> str:
    """Return the name of a part's manifest in a store."""
    return f"{checkpoint.folder}/part-{part:05d}.json"


def parse_manifest_name(name: str) -> tuple[CheckpointId, int] | None:
    """Return the checkpoint and part whose manifest has this name, or None."""
    folder, _, leaf = name.rpartition("/")
    match = re.fullmatch(r"part-(\d{5,})\.json", leaf)
    checkpoint = CheckpointId.parse(folder)
    return None if match is None or checkpoint is None else (checkpoint, int(match[1]))


def name_of_unit(unit: int, num_layers: int) -> str:
    """Return the name of a unit in files and messages."""
    if unit < 0:
        return "before"
    return "after" if unit >= num_layers else f"layer-{unit:04d}"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a slice and where its bytes are."""

    key: str
    """`WEIGHT` or the name of an optimizer state."""
    file: str
    """Name of the file inside the checkpoint's folder."""
    dtype: str
    """As safetensors spells it, such as "F32"."""
    shape: tuple[int, ...]
    """Shape as stored: rows of the cut dim first if `by_rows`."""
    by_rows: bool
    """Whether intervals of the slice's rows may be read; if not, only the whole tensor."""
    begin: int
    """First byte in the file."""
    end: int
    """One past the last byte."""


@dataclass(frozen=True, slots=True)
class SliceEntry:
    """Rows [start, stop) of a parameter along `dim`, with all their tensors."""

    parameter: str
    unit: int
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dim: int
    start: int
    stop: int
    scalars: Mapping[str, Scalar]
    tensors: tuple[TensorEntry, ...]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a part; every block of it has a checksum, so that it can be read in part."""

    name: str
    """Name inside the checkpoint's folder."""
    unit: int | None
    """The unit it belongs to, None for metadata."""
    size_bytes: int
    checksums: tuple[int, ...]
    """CRC-32 of each block of `block_bytes`; the last block may be shorter."""


@dataclass(frozen=True, kw_only=True)
class PartManifest:
    """Describes all that one rank saved, and the plan under which it did."""

    id: CheckpointId
    part: int
    """The global rank that saved it."""
    world_size: int
    """Number of parts of a complete checkpoint."""
    num_layers: int
    block_bytes: int
    """Bytes that one checksum covers."""
    files: tuple[FileEntry, ...]
    slices: tuple[SliceEntry, ...]
    plan: Mapping[str, Any] | None
    """The plan that ran, as `ParallelPlan.to_dict` gives it."""
    versions: Mapping[str, str]
    """Versions of the packages that wrote it."""

    def file(self, name: str) -> FileEntry:
        """Return the entry of a file; CheckpointError if the part has no such file."""
        for entry in self.files:
            if entry.name == name:
                return entry
        raise CheckpointError(f"Part {self.part} of {self.id} has no file {name}.")

    def has_file(self, name: str) -> bool:
        """Whether the part has a file."""
        return any(entry.name == name for entry in self.files)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.size_bytes for entry in self.files)

    def refuse_forged(self) -> None:
        """Check that a rank can have written this manifest: its file may come from anywhere.

        Raises:
            CheckpointError: It names files outside of its folder, or bytes that files don't have.
        """
        sizes = {entry.name: entry.size_bytes for entry in self.files}
        names = [(name, f"{self.id.folder}/{name}") for name in sizes]
        is_good = (
            CheckpointId.parse(self.id.folder) == self.id
            and 0 <= self.part < self.world_size
            and self.block_bytes > 0
            and all(_BARE_NAME.fullmatch(name) and not parse_manifest_name(n) for name, n in names)
            and all(len(e.checksums) == -(-e.size_bytes // self.block_bytes) for e in self.files)
            and all(
                0 <= tensor.begin <= tensor.end <= sizes.get(tensor.file, -1)
                for item in self.slices
                for tensor in item.tensors
            )
        )
        if not is_good:
            raise CheckpointError("The checkpoint's manifest can't have been written by a rank.")

    def encode(self) -> bytes:
        """Return the manifest as JSON text that carries its own checksum."""
        fields = {"format": _FORMAT, **_PARSER.dump_python(self)}
        body = json.dumps(fields, separators=(",", ":")).encode()
        return _HEAD % zlib.crc32(body) + body + _TAIL

    @classmethod
    def decode(cls, data: bytes) -> "PartManifest":
        """Parse what `encode` returns.

        Raises:
            CheckpointError: It is torn (only partly written), altered, or of another format.
        """
        length = len(_HEAD % 0)
        text = data[length : -len(_TAIL)]
        if data[:length] != _HEAD % zlib.crc32(text) or data[-len(_TAIL) :] != _TAIL:
            raise CheckpointError("The checkpoint's manifest is torn: its checksum is wrong.")
        try:
            body = json.loads(text)
            if body["format"] != _FORMAT:
                raise CheckpointError(
                    f"The checkpoint's manifest has format {body['format']}; this version of "
                    f"lightning_hetero reads format {_FORMAT}. Install the version that wrote it: "
                    f"{body.get('versions')}."
                )
            manifest = _PARSER.validate_python(body)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"The checkpoint's manifest can't be read: {error!r}.") from error
        return manifest


# Made at import, since it takes some 50 ms, which a recovery shouldn't wait for.
_PARSER = TypeAdapter(PartManifest)


def rank_metadata_name(part: int) -> str:
    """Return the name of the file with one rank's own metadata."""
    return f"rank-{part:05d}.pt"


class BlockChecksums:
    """Checksums of the blocks of a stream that arrives in chunks of any size."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._done: list[int] = []
        self._crc = 0
        self._filled_bytes = 0

    def update(self, chunk: Buffer) -> None:
        """Take the next bytes of the stream."""
        view = memoryview(chunk).cast("B")
        position = 0
        while position < len(view):
            part = view[position : position + self._block_bytes - self._filled_bytes]
            self._crc = zlib.crc32(part, self._crc)
            self._filled_bytes += len(part)
            position += len(part)
            if self._filled_bytes == self._block_bytes:
                self._close_block()

    def finish(self) -> tuple[int, ...]:
        """Return the checksums of all blocks; the stream has ended."""
        if self._filled_bytes:
            self._close_block()
        return tuple(self._done)

    def _close_block(self) -> None:
        self._done.append(self._crc)
        self._crc = self._filled_bytes = 0


def fault_in(data: Buffer, start: int, stop: int, entry: FileEntry, block_bytes: int) -> str:
    """Return what is wrong with bytes [start, stop), whole blocks, of a file; "" if nothing is."""
    if len(data) != stop - start:
        return f"got {len(data)} of {stop - start} bytes at {start}"
    view, first = memoryview(data).cast("B"), start // block_bytes
    # Live memory has no checksums.
    for index, checksum in enumerate(entry.checksums[first : -(-stop // block_bytes)]):
        if zlib.crc32(view[index * block_bytes : (index + 1) * block_bytes]) != checksum:
            return f"the checksum of block {first + index} ({block_bytes} bytes each) is wrong"
    return ""
