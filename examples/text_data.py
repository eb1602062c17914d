"""Real text that every machine has: the sources of Python's own standard library, as bytes.

A sample is one top-level piece of a file (its head, a function or a class), so lengths have the
long tail that packing and balancing are for: half are under 500 bytes, some are over 20,000.
"""

import os
import re
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_hetero.models import PackedBatch, pack_samples

END_OF_TEXT = 256
"""Token after the last byte of a sample that wasn't clipped."""
VOCAB_SIZE = 257
"""All bytes and `END_OF_TEXT`."""

_SKIPPED_FOLDERS = {
    "site-packages",
    "test",
    "tests",
    "encodings",
    "idlelib",
    "lib2to3",
    "__pycache__",
}
_TOP_LEVEL = re.compile(rb"\n(?=(?:def|class|async def) |@)")
_VALIDATION_SHARE = 20  # one file in twenty


def byte_tokens(piece: bytes) -> Tensor:
    """Return a piece's bytes and `END_OF_TEXT`."""
    row = torch.full((len(piece) + 1,), END_OF_TEXT)
    row[:-1] = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
    return row


class PythonSourceDataset(Dataset[Tensor]):
    """Top-level pieces of standard library files as rows of byte tokens.

    Every twentieth file is for validation, from the first one on, so both splits have some.
    """

    def __init__(
        self,
        split: Literal["train", "val"],
        *,
        context_length: int = 1024,
        max_files: int = 300,
        encode: Callable[[bytes], Tensor] = byte_tokens,
    ) -> None:
        """Read the files.

        Args:
            split: Which files.
            context_length: Tokens to keep of a longer piece.
            max_files: Files to read at most, of both splits, spread evenly over the library.
            encode: Makes a piece's tokens.
        """
        self.context_length = context_length
        self.samples = [
            encode(piece)[:context_length].clone()
            for index, path in enumerate(source_files(max_files))
            if (index % _VALIDATION_SHARE == 0) == (split == "val")
            for piece in top_level_pieces(path.read_bytes())
        ]

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        """Return one sample's tokens, (length,)."""
        return self.samples[index]


class PythonSourceData(L.LightningDataModule):
    """Packed batches of Python sources; nothing but an ordinary DataLoader."""

    def __init__(
        self,
        *,
        context_length: int = 1024,
        samples_per_batch: int = 16,
        max_files: int = 300,
        shuffle: bool = True,
    ) -> None:
        super().__init__()
        self.context_length = context_length
        self.samples_per_batch = samples_per_batch
        self.max_files = max_files
        self.shuffle = shuffle

    def setup(self, stage: str) -> None:
        """Read the files of both splits."""
        self.train, self.val = (
            PythonSourceDataset(split, context_length=self.context_length, max_files=self.max_files)
            for split in ("train", "val")
        )

    def train_dataloader(self) -> DataLoader[PackedBatch]:
        """Return packed batches, shuffled if so asked."""
        return self._loader(self.train, shuffle=self.shuffle)

    def val_dataloader(self) -> DataLoader[PackedBatch]:
        """Return packed batches in order."""
        return self._loader(self.val, shuffle=False)

    def _loader(self, dataset: Dataset[Tensor], *, shuffle: bool) -> DataLoader[PackedBatch]:
        return DataLoader(
            dataset,
            batch_size=self.samples_per_batch,
            shuffle=shuffle,
            drop_last=shuffle,
            collate_fn=pack_samples,
        )


def source_files(max_files: int) -> list[Path]:
    """Return files spread evenly over the standard library, no tests, tables, extras."""
    paths = _standard_library()
    count = min(max_files, len(paths))
    return [paths[index * len(paths) // count] for index in range(count)]


@cache
def _standard_library() -> list[Path]:
    found = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = set(subfolders) - _SKIPPED_FOLDERS
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def top_level_pieces(source: bytes) -> list[bytes]:
    """Return a file's head and its top-level functions and classes, decorators with them."""
    pieces: list[bytes] = []
    for piece in _TOP_LEVEL.split(source):
        if pieces and pieces[-1].startswith(b"@") and _ends_in_decorator(pieces[-1]):
            pieces[-1] += b"\n" + piece
        elif piece.strip():
            pieces.append(piece)
    return pieces


def decode(tokens: list[int]) -> str:
    """Return the text of tokens up to the end of the text."""
    if END_OF_TEXT in tokens:
        tokens = tokens[: tokens.index(END_OF_TEXT)]
    return bytes(tokens).decode("utf-8", errors="replace")


def _ends_in_decorator(piece: bytes) -> bool:
    return not re.search(rb"^(?:def|class|async def) ", piece, re.MULTILINE)
