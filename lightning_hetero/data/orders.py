"""Compare the data that ranks are about to read, at the start of each pass over a loader.

Every rank reads the whole order of samples and keeps its pipeline's part. If ranks read different
orders, some samples would be trained on twice and others never; if one rank's order is shorter, the
others would wait for it forever. So at the start of a pass each rank computes a digest of the first
samples' indices, and ranks compare digests and lengths before the pass's first step.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Subset

from lightning_hetero.core.errors import ConfigurationError

_NUM_BATCHES, _NUM_INDICES = 1024, 4096
"""Largest number of batches, and of indices, of a pass that its digest covers."""


@dataclass(frozen=True)
class Order:
    """What one rank is about to read from a loader."""

    loader: str
    """Which loader, such as "training loader 0"."""
    num_batches: int | None
    """Its number of batches; None if the loader has no length."""
    num_samples: int | None
    digest: int
    """Digest of the first indices; 0 if the loader has none."""

    def __str__(self) -> str:
        sizes = f"{_number(self.num_batches, 'batches')} of {_number(self.num_samples, 'samples')}"
        return sizes if self.digest == 0 else f"{sizes} in order {self.digest:08x}"


def check_alike(orders: Sequence[Sequence[Order]]) -> None:
    """Refuse ranks that are about to read different data.

    Args:
        orders: By rank, the loaders whose pass begins.

    Raises:
        ConfigurationError: Ranks differ; the same on every rank.
    """
    for rank, own in enumerate(orders):
        for first, other in zip(orders[0], own, strict=False):
            if first != other:
                raise ConfigurationError(
                    f"Ranks read different data from the {first.loader}: rank 0 has {first}, rank "
                    f"{rank} has {other}. Every rank must read the same samples in the same order, "
                    "of which HeteroStrategy gives each pipeline its part. Build data sets and "
                    "samplers alike on all ranks: the same files, L.seed_everything(seed) before "
                    "a data set is split or shuffled, and a generator with a fixed seed."
                )


def peek(batches: Iterator[Any], dataset: object) -> tuple[int, Iterator[Any]]:
    """Return a digest of the first batches' indices and the data set's own, and all batches."""
    digest, num_indices = _digest_of(dataset), 0
    seen: list[Any] = []
    while len(seen) < _NUM_BATCHES and num_indices < _NUM_INDICES:
        batch = next(batches, None)
        if batch is None:
            break
        seen.append(batch)
        digest = zlib.crc32(repr(batch).encode(), digest)
        num_indices += len(batch) if hasattr(batch, "__len__") else 1
    return digest, _joined(seen, batches)


def _joined(seen: list[Any], batches: Iterator[Any]) -> Iterator[Any]:
    yield from seen
    # `for` would call `iter` again, on which some samplers restart.
    while (batch := next(batches, None)) is not None:
        yield batch


def size_of(value: Any) -> int | None:
    """Return the length of a loader, a sampler or a data set; None if it doesn't know."""
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def _digest_of(dataset: object) -> int:
    """Return a digest of the indices that subsets take, as `random_split` makes them."""
    digest = 1
    while isinstance(dataset, Subset):
        digest = zlib.crc32(repr(dataset.indices[:_NUM_INDICES]).encode(), digest)
        dataset = dataset.dataset
    return digest


def _number(count: int | None, unit: str) -> str:
    return f"an unknown number of {unit}" if count is None else f"{count:,} {unit}"
