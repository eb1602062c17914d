"""Find out how much an iteration has to do, before the first batch is there.

Looked at, in order: attributes of the loader, of its dataset, of the data module and of the module
(and of their `hparams`), then the first sample of a dataset that can be indexed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from lightning_hetero.assign.pipeline_cost import typical_length
from lightning_hetero.core.arrays import IntArray
from lightning_hetero.data.module import HeteroDataModule
from lightning_hetero.models.batches import sample_tokens
from lightning_hetero.runtime.random_state import preserved_random_state

__all__ = ["BatchSizes", "DataFacts", "find_batch_sizes", "find_data", "find_sizes"]

_BATCH_NAMES = ("batch_size", "train_batch_size", "per_device_train_batch_size")
_LENGTH_NAMES = (
    "context_length",
    "sequence_length",
    "seq_length",
    "seq_len",
    "max_seq_length",
    "max_length",
    "block_size",
)


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """A data module's knowledge of its samples."""

    lengths: IntArray
    """Tokens of the samples, or of a fair part of them."""
    tokens_per_step: int
    """Tokens of an iteration on all pipelines together."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return int(self.lengths.max())

    @property
    def typical(self) -> int:
        """Tokens of the sample that the average token is in."""
        return typical_length(self.lengths)


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """Sizes that were found; None where nothing says."""

    samples: int | None
    """Samples of a loader's batch."""
    sequence_length: int | None
    """Tokens of a sample."""


def find_batch_sizes(sources: Sequence[object]) -> BatchSizes:
    """Return batch size and sequence length from loaders, data modules and modules.

    Args:
        sources: Where to look, the likeliest first; a loader's dataset is looked at too.
    """
    expanded = list(_expand(sources))
    return BatchSizes(
        samples=_first_number(expanded, _BATCH_NAMES),
        sequence_length=_first_number(expanded, _LENGTH_NAMES) or _sample_length(expanded),
    )


def _expand(sources: Iterable[object]) -> Iterator[object]:
    for source in sources:
        yield source
        for name in ("batch_sampler", "dataset", "hparams", "config"):
            inner = getattr(source, name, None)
            if inner is not None:
                yield inner


def _first_number(sources: Sequence[object], names: Sequence[str]) -> int | None:
    for source in sources:
        for name in names:
            value = getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _sample_length(sources: Sequence[object]) -> int | None:
    for source in sources:
        dataset: Any = getattr(source, "dataset", None)
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            # A guess must not end a run that would go well.
            with suppress(Exception):
                if (length := sample_tokens(dataset[0])) is not None:
                    return length
    return None


def find_data(trainer: pl.Trainer) -> Callable[[], DataFacts] | None:
    """Return what tells of the samples that a data module assigns to plans; None without one."""
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(datamodule, HeteroDataModule):
        return None
    return lambda: DataFacts(
        lengths=datamodule.sample_lengths(), tokens_per_step=datamodule.tokens_per_step
    )


def find_sizes(trainer: pl.Trainer) -> BatchSizes:
    """Return how much a batch of the training loader holds, as far as something says it."""
    # Nothing public holds the loader before the first epoch.
    loader = getattr(getattr(trainer.fit_loop, "_data_source", None), "instance", None)
    datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
    with preserved_random_state():
        return find_batch_sizes([loader, datamodule, trainer.lightning_module])
