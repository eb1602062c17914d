"""Read boxes (a range along each dim) of tensors from safetensors files, and no other bytes.

A rank owns slices, and reads only these of a pretrained model. If files store a parameter in other
pieces than the model has it (experts one by one; query, key and value apart), it is described by a
tree whose leaves are stored tensors: a box of the parameter is read as boxes of the leaves.
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
"""Dtypes by their names in safetensors."""
_LENGTH_BYTES = 8
"""A file begins with its header's length, little-endian; offsets count from the header's end."""
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


class StoredTensor(Protocol):
    """A tensor of which boxes can be read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    def read(self, box: Box) -> Tensor:
        """Return a box of the tensor, on the CPU; the box must not be empty."""


@dataclass
class SafetensorsFile:
    """One safetensors file; opened for each read, so that the object can be copied and pickled.

    Raises:
        CheckpointError: The file can't be read, or isn't safetensors.
    """

    path: Path
    num_bytes_read: int = 0
    """Bytes of tensors read so far; the header isn't counted."""
    tensors: Mapping[str, StoredTensor] = field(init=False, repr=False)
    """The tensors by their names in the file."""
    metadata: Mapping[str, str] = field(init=False, repr=False, default_factory=dict)
    """What its writer noted beside them."""

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
        self.metadata = header.get("__metadata__", {})
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
        """Fill `into` with byte ranges of equal length that begin at `starts`, in that order.

        Raises:
            CheckpointError: The file ends too early.
        """
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
        # Dims after the last cut one are read whole, so that one byte range spans them.
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
    """Tensors of one shape, stacked along a new dim."""

    parts: tuple[StoredTensor, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stack."""
        inner = self.parts[0].shape
        return (*inner[: self.dim], len(self.parts), *inner[self.dim :])

    def read(self, box: Box) -> Tensor:
        """Return a box of the stack, on the CPU."""
        inner = (*box[: self.dim], *box[self.dim + 1 :])
        return torch.stack(
            [part.read(inner) for part in self.parts[slice(*box[self.dim])]], self.dim
        )


@dataclass(frozen=True)
class JoinedTensor:
    """Tensors concatenated along one dim."""

    parts: tuple[StoredTensor, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the concatenated tensor."""
        first = self.parts[0].shape
        length = sum(part.shape[self.dim] for part in self.parts)
        return (*first[: self.dim], length, *first[self.dim + 1 :])

    def read(self, box: Box) -> Tensor:
        """Return a box of the concatenated tensor, on the CPU."""
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
    """Return the files of a `save_pretrained` folder; only their headers are read.

    Raises:
        CheckpointError: The folder has no such files, or one of them or their index is missing or
            broken.
    """
    if (folder / _WEIGHTS).is_file():
        return [SafetensorsFile(folder / _WEIGHTS)]
    if (folder / _INDEX).is_file():
        return [SafetensorsFile(path) for path in _indexed_paths(folder / _INDEX)]
    found = sorted(item.name for item in folder.iterdir()) if folder.is_dir() else "no folder"
    raise CheckpointError(
        f"{folder} holds neither {_WEIGHTS} nor {_INDEX} (found: {found}). Save the model with "
        "save_pretrained, which writes them."
    )


def _indexed_paths(index: Path) -> list[Path]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [index.parent / name for name in sorted(set(names))]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"Can't read {index} as an index of safetensors files ({error!r}). Copy it again."
        ) from error
