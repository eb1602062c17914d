"""Read the lengths of a dataset's samples once, and remember them in a file.

The file's name is a digest of the dataset's type, size and the tokens of some samples, so another
dataset doesn't find it. Where two datasets agree in all of that, reading a sample of another length
than remembered is an error (see `samples`), never a wrong assignment.
"""

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from lightning_hetero.core.arrays import IntArray
from lightning_hetero.core.cache import cache_folder
from lightning_hetero.data.samples import num_tokens

__all__ = ["cached_lengths", "lengths_file", "read_lengths"]

_NUM_PROBES = 64
_CHUNK = 256


class _Lengths:
    """A dataset of another one's lengths, by the chunk."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return -(-len(self._dataset) // _CHUNK)

    def __getitem__(self, chunk: int) -> list[int]:
        stop = min((chunk + 1) * _CHUNK, len(self._dataset))
        return [num_tokens(self._dataset[index]) for index in range(chunk * _CHUNK, stop)]


def read_lengths(dataset: Any, *, num_workers: int = 0) -> IntArray:
    """Return the tokens of each sample of a map-style dataset, by reading it."""
    chunks: Any = DataLoader(
        _Lengths(dataset),  # type: ignore[arg-type]
        batch_size=None,
        collate_fn=_as_is,
        num_workers=num_workers,
    )
    return np.array([length for chunk in chunks for length in chunk], dtype=np.int64)


def cached_lengths(dataset: Any, *, file: Path | None = None, num_workers: int = 0) -> IntArray:
    """Return the lengths from their file, else read them and write it if that is possible.

    Args:
        dataset: A map-style dataset.
        file: Where they are kept; None takes `lengths_file`.
        num_workers: Processes that read.
    """
    path = file or lengths_file(dataset)
    with contextlib.suppress(OSError, ValueError):
        found: IntArray = np.load(path, allow_pickle=False)
        if found.shape == (len(dataset),):
            return found
    lengths = read_lengths(dataset, num_workers=num_workers)
    # A folder that can't be written costs only the next run's time.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.npy")
        np.save(temporary, lengths)
        temporary.replace(path)
    return lengths


def lengths_file(dataset: Any) -> Path:
    """Return the file that holds a dataset's lengths by default."""
    count = len(dataset)
    digest = hashlib.sha256(f"{type(dataset).__qualname__} {count}".encode())
    for index in sorted({count * probe // _NUM_PROBES for probe in range(_NUM_PROBES)} - {count}):
        sample = dataset[index]
        tokens = sample["input_ids"] if isinstance(sample, dict) else sample
        digest.update(np.asarray(tokens).astype(np.int64).tobytes())
    return cache_folder() / f"lengths-{digest.hexdigest()[:32]}.npy"


def _as_is(chunk: Any) -> Any:
    return chunk
