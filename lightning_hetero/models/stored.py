"""Read any box of a tensor out of safetensors files, and not a byte more.

A rank owns slices, so of a pretrained model it reads only what they need. Parameters that are kept
in other pieces than they are used in (experts one by one, query, key and value apart) are described
by a tree over the stored tensors: a box of the tree is read as boxes of its leaves.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_hetero.core.errors import CheckpointError

__all__ = [
    "SAFETENSORS_DTYPES",
    "Box",
    "JoinedTensor",
    "PieceOfTensor",
    "SafetensorsFile",
    "StackedTensor",
    "StoredTensor",
    "TransposedTensor",
    "open_folder",
]

Box = tuple[tuple[int, int], ...]
"""Half-open [start, stop) along each dim."""

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
"""How safetensors spells each dtype."""
_LENGTH_BYTES = 8
"""A file begins with its header's length, little-endian; offsets count from the header's end."""
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


class StoredTensor(Protocol):
    """A tensor that is read in part."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its whole shape."""

    def read(self, box: Box) -> Tensor:
        """Return a box of it, on CPU; the box isn't empty."""


@dataclass
class SafetensorsFile:
    """One file; it is opened for each read, so that it can be copied and sent to processes.

    Raises:
        CheckpointError: It is no safetensors file, or shorter than it says.
    """

    path: Path
    num_bytes_read: int = 0
    """Bytes of tensors; the header isn't counted."""
    tensors: Mapping[str, StoredTensor] = field(init=False, repr=False)
    """By their names in the file."""

    def __post_init__(self) -> None:
        try:
            self.tensors = dict(self._entries())
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"Can't read {self.path} as a safetensors file ({error!r}). Copy it again."
            ) from error

    def _entries(self) -> Iterator[tuple[str, StoredTensor]]:
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > self.path.stat().st_size:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        for name, item in header.items():
            if name != "__metadata__":
                yield (
                    name,
                    _FileTensor(
                        file=self,
                        dtype=SAFETENSORS_DTYPES[item["dtype"]],
                        shape=tuple(item["shape"]),
                        first_byte=_LENGTH_BYTES + length + item["data_offsets"][0],
                    ),
                )

    def read_runs(self, starts: Sequence[int], into: memoryview) -> None:
        """Fill `into` with runs of bytes of one length that begin at `starts`."""
        length = len(into) // len(starts)
        with self.path.open("rb", buffering=0) as file:
            for index, start in enumerate(starts):
                file.seek(start)
                run = into[index * length : (index + 1) * length]
                while run:
                    count = file.readinto(run)
                    if not count:
                        raise CheckpointError(
                            f"{self.path} ends before byte {start + length}, where its header puts "
                            "a tensor. Copy it again."
                        )
                    run = run[count:]
        self.num_bytes_read += len(into)


@dataclass(frozen=True, kw_only=True)
class _FileTensor:
    file: SafetensorsFile
    dtype: torch.dtype
    shape: tuple[int, ...]
    first_byte: int

    def read(self, box: Box) -> Tensor:
        sizes = [stop - start for start, stop in box]
        rows = torch.empty(sizes, dtype=self.dtype)
        # Dims after the last one that is cut are whole, so a run spans them.
        cut = max((d for d, size in enumerate(sizes) if size != self.shape[d]), default=0)
        strides = [prod(self.shape[d + 1 :]) * self.dtype.itemsize for d in range(len(sizes))]
        first = self.first_byte + (box[cut][0] * strides[cut] if box else 0)
        starts = [
            first + sum(index * stride for index, stride in zip(place, strides, strict=False))
            for place in product(*(range(*ends) for ends in box[:cut]))
        ]
        self.file.read_runs(starts, rows.view(-1).view(torch.uint8).numpy().data)
        return rows


@dataclass(frozen=True)
class StackedTensor:
    """Tensors of one shape along a new dim."""

    parts: tuple[StoredTensor, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Its whole shape."""
        inner = self.parts[0].shape
        return (*inner[: self.dim], len(self.parts), *inner[self.dim :])

    def read(self, box: Box) -> Tensor:
        """Return a box of it, on CPU."""
        inner = (*box[: self.dim], *box[self.dim + 1 :])
        return torch.stack(
            [part.read(inner) for part in self.parts[slice(*box[self.dim])]], self.dim
        )


@dataclass(frozen=True)
class JoinedTensor:
    """Tensors end to end along one dim."""

    parts: tuple[StoredTensor, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Its whole shape."""
        first = self.parts[0].shape
        length = sum(part.shape[self.dim] for part in self.parts)
        return (*first[: self.dim], length, *first[self.dim + 1 :])

    def read(self, box: Box) -> Tensor:
        """Return a box of it, on CPU."""
        start, stop = box[self.dim]
        ends = accumulate(part.shape[self.dim] for part in self.parts)
        pieces = []
        for part, end in zip(self.parts, ends, strict=True):
            begin = end - part.shape[self.dim]
            own = max(start, begin) - begin, min(stop, end) - begin
            if own[0] < own[1]:
                pieces.append(part.read((*box[: self.dim], own, *box[self.dim + 1 :])))
        return torch.cat(pieces, self.dim)


@dataclass(frozen=True)
class PieceOfTensor:
    """Rows [start, stop) of a tensor along one dim."""

    whole: StoredTensor
    dim: int
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        shape = self.whole.shape
        return (*shape[: self.dim], self.stop - self.start, *shape[self.dim + 1 :])

    def read(self, box: Box) -> Tensor:
        """Return a box of it, on CPU."""
        start, stop = box[self.dim]
        own = self.start + start, self.start + stop
        return self.whole.read((*box[: self.dim], own, *box[self.dim + 1 :]))


@dataclass(frozen=True)
class TransposedTensor:
    """A tensor with two dims exchanged."""

    whole: StoredTensor
    dims: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self._exchange(self.whole.shape)

    def read(self, box: Box) -> Tensor:
        """Return a box of it, on CPU."""
        return self.whole.read(self._exchange(box)).transpose(*self.dims)

    def _exchange(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        order = list(range(len(items)))
        order[self.dims[0]], order[self.dims[1]] = order[self.dims[1]], order[self.dims[0]]
        return tuple(items[index] for index in order)


def open_folder(folder: Path) -> list[SafetensorsFile]:
    """Return the files of a `save_pretrained` folder, of which only the headers are read.

    Raises:
        CheckpointError: There is none, or one that the index names is missing or broken.
    """
    if (folder / _WEIGHTS).is_file():
        return [SafetensorsFile(folder / _WEIGHTS)]
    if (folder / _INDEX).is_file():
        names = json.loads((folder / _INDEX).read_text())["weight_map"].values()
        return [SafetensorsFile(folder / name) for name in sorted(set(names))]
    found = sorted(item.name for item in folder.iterdir()) if folder.is_dir() else "no folder"
    raise CheckpointError(
        f"{folder} holds neither {_WEIGHTS} nor {_INDEX} (found: {found}). Save the model with "
        "save_pretrained, which writes them."
    )
