"""Read boxes (a range along each dim) of tensors from safetensors files, and no other bytes.

A rank owns slices, and reads only these of a pretrained model. If files store a parameter in other
pieces than the model has it (experts one by one; query, key and value separately), a tree describes
it whose leaves are stored tensors: a box of the parameter is read as boxes of the leaves.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_hetero.core.errors import CheckpointError

Box = tuple[tuple[int, int], ...]
"""A half-open interval [start, stop) along each dim."""

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
    metadata: Mapping[str, str] = field(init=False, repr=False)
    """What its writer stored besides the tensors."""

    def __post_init__(self) -> None:
        with self._opened() as file:
            self.metadata = file.metadata() or {}
            self.tensors = {
                name: _FileTensor(self, name, tuple(file.get_slice(name).get_shape()))
                for name in file.keys()  # noqa: SIM118 - it is no mapping
            }

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor, on the CPU."""
        with self._opened() as file:
            cut = tuple(slice(*ends) for ends in box)
            # A copy, since what is cut is a view of the mapped file.
            rows: Tensor = file.get_slice(name)[cut].clone() if box else file.get_tensor(name)
        self.num_bytes_read += rows.numel() * rows.itemsize
        return rows

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        try:
            with safe_open(self.path, framework="pt") as file:
                yield file
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"Can't read {self.path} as a safetensors file ({error!r}). Copy it again."
            ) from error


@dataclass(frozen=True)
class _FileTensor:
    file: SafetensorsFile
    name: str
    shape: tuple[int, ...]

    def read(self, box: Box) -> Tensor:
        return self.file.read(self.name, box)


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
