"""Samples of token ids as pieces that fit the context: longer ones are cut, split or refused.

A dataset's sample is a row of token ids (tensor, array or list), or a mapping with one as
"input_ids", whose other entries of the same length (labels, masks) are cut alike. All other modules
count pieces: a sample that is split counts as several.

The lengths of a dataset's samples are read once and cached in a file. Its name is a digest of the
dataset's type and size and the tokens of some samples, so that other datasets have other files. If
two datasets still share one, a sample whose length differs from the cached one is an error when it
is read, never a wrong assignment.
"""

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch.utils.data import DataLoader

from lightning_hetero.core.arrays import IntArray
from lightning_hetero.core.errors import BatchError, ConfigurationError
from lightning_hetero.core.process.cache import cache_folder, write_whole
from lightning_hetero.core.reading.choices import Choice
from lightning_hetero.models.packing import row_of, token_ids

__all__ = [
    "OnOverlong",
    "TokenSamples",
    "as_is",
    "cached_lengths",
    "cut_sample",
    "lengths_file",
    "num_tokens",
    "read_lengths",
    "spans_of",
]

_NUM_PROBES = 64
_CHUNK = 256


class OnOverlong(Choice):
    """What to do with a sample that is longer than the context."""

    CUT = "cut"
    """Keep only its first tokens."""
    SPLIT = "split"
    """Split it into several samples."""
    REFUSE = "refuse"
    """Raise an error that names it."""


class TokenSamples:
    """The pieces of a map-style dataset.

    Args:
        dataset: Anything with `len` and integer indices.
        lengths: Tokens of each sample; checked when a sample is read.
        context_length: Most tokens of a piece.
        on_overlong: What to do with longer samples.

    Raises:
        ConfigurationError: Lengths don't match the dataset, or a sample is empty.
        BatchError: A sample is too long and `on_overlong` is "refuse".
    """

    def __init__(
        self,
        dataset: Any,
        lengths: ArrayLike,
        *,
        context_length: int,
        on_overlong: OnOverlong | str = OnOverlong.CUT,
    ) -> None:
        if context_length < 1:
            raise ConfigurationError(f"context_length is {context_length}; it must be 1 or more.")
        self.dataset = dataset
        self._whole = _checked(lengths, len(dataset))
        action = OnOverlong(on_overlong)
        if action is OnOverlong.REFUSE and (self._whole > context_length).any():
            index = int(self._whole.argmax())
            _refuse(index, int(self._whole[index]), context_length)
        if action is OnOverlong.SPLIT:
            counts = -(-self._whole // context_length)
        else:
            counts = np.ones_like(self._whole)
        self._sample_of = np.repeat(np.arange(len(self._whole)), counts)
        first_piece = np.cumsum(counts) - counts
        number = np.arange(len(self._sample_of)) - first_piece[self._sample_of]
        self._starts: IntArray = number * context_length
        left = self._whole[self._sample_of] - self._starts
        self.lengths: IntArray = np.minimum(left, context_length)
        """Tokens of each piece."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        """Return a piece, of the same type as its sample.

        Raises:
            BatchError: The sample has another length than `lengths` says.
        """
        sample_index = int(self._sample_of[index])
        sample = self.dataset[sample_index]
        found, expected = num_tokens(sample), int(self._whole[sample_index])
        if found != expected:
            raise BatchError(
                f"Sample {sample_index} has {found} tokens but its length is known as {expected}. "
                "Give the dataset's true lengths, or delete the file that they were cached in."
            )
        start = int(self._starts[index])
        return cut_sample(sample, start, start + int(self.lengths[index]))


def num_tokens(sample: Any) -> int:
    """Return the number of tokens of a sample."""
    return len(token_ids(sample))


def cut_sample(sample: Any, start: int, stop: int) -> Any:
    """Return tokens [start, stop) of a sample, and that part of its entries of equal length."""
    length = num_tokens(sample)
    if (start, stop) == (0, length):
        return sample
    if not isinstance(sample, Mapping):
        return sample[start:stop]
    return {
        key: value[start:stop] if _is_row(value) and len(value) == length else value
        for key, value in sample.items()
    }


def spans_of(
    length: int, index: int, *, context_length: int, on_overlong: OnOverlong
) -> list[tuple[int, int]]:
    """Return (start, stop) of a sample's pieces; BatchError if it is too long and refused."""
    if length <= context_length:
        return [(0, length)]
    if on_overlong is OnOverlong.REFUSE:
        _refuse(index, length, context_length)
    if on_overlong is OnOverlong.CUT:
        return [(0, context_length)]
    return [
        (start, min(start + context_length, length)) for start in range(0, length, context_length)
    ]


def _is_row(value: Any) -> bool:
    return isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0


def _checked(lengths: ArrayLike, num_samples: int) -> IntArray:
    if num_samples == 0:
        raise ConfigurationError("The dataset has 0 samples; give at least one.")
    array = np.asarray(lengths)
    if array.shape != (num_samples,) or not np.issubdtype(array.dtype, np.integer):
        raise ConfigurationError(
            f"Lengths have shape {array.shape} and type {array.dtype} but the dataset has "
            f"{num_samples} samples; give one integer a sample."
        )
    if array.min() < 1:
        raise ConfigurationError(
            f"Sample {int(array.argmin())} is empty; drop it from the dataset."
        )
    return array.astype(np.int64)


def _refuse(index: int, length: int, context_length: int) -> None:
    raise BatchError(
        f"Sample {index} has {length} tokens but context_length is {context_length} and "
        'on_overlong is "refuse". Drop it, or choose on_overlong="cut" or "split".'
    )


class _Lengths:
    """A dataset of the lengths of another dataset's samples."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> int:
        return num_tokens(self._dataset[index])


def read_lengths(dataset: Any, *, num_workers: int = 0) -> IntArray:
    """Read all samples of a map-style dataset, and return the tokens of each, [num_samples]."""
    chunks: Any = DataLoader(
        _Lengths(dataset),  # type: ignore[arg-type]
        batch_size=_CHUNK,
        collate_fn=as_is,
        num_workers=num_workers,
    )
    return np.fromiter(chain.from_iterable(chunks), dtype=np.int64)


def cached_lengths(dataset: Any, *, file: Path | None = None, num_workers: int = 0) -> IntArray:
    """Return a dataset's lengths from their file; else read the dataset, and try to write the file.

    Args:
        dataset: A map-style dataset.
        file: The file; None takes `lengths_file`.
        num_workers: Processes that read samples; 0 uses this process.
    """
    path = file or lengths_file(dataset)
    with contextlib.suppress(OSError, ValueError):
        found: IntArray = np.load(path, allow_pickle=False)
        if found.shape == (len(dataset),):
            return found
    lengths = read_lengths(dataset, num_workers=num_workers)
    # If the folder can't be written, the next run reads the samples again.
    with contextlib.suppress(OSError):
        write_whole(path, lambda file: _save(file, lengths))
    return lengths


def _save(path: Path, lengths: IntArray) -> None:
    with path.open("wb") as file:  # Given a name, NumPy would append ".npy" to it.
        np.save(file, lengths)


def lengths_file(dataset: Any) -> Path:
    """Return the file that holds a dataset's lengths by default."""
    count = len(dataset)
    digest = hashlib.sha256(f"{type(dataset).__qualname__} {count}".encode())
    for index in sorted({count * probe // _NUM_PROBES for probe in range(_NUM_PROBES)} - {count}):
        name = f"Sample {index}"
        digest.update(row_of(token_ids(dataset[index], name), name).numpy().tobytes())
    return cache_folder() / f"lengths-{digest.hexdigest()[:32]}.npy"


def as_is(item: Any) -> Any:
    """Return the argument: the collate function of loaders that pass samples on unchanged."""
    return item
