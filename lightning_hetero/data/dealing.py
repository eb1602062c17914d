"""Deal the batches of an ordinary data loader out to pipelines.

Every rank reads the same order of samples. An iteration takes D consecutive batches for D
pipelines, puts them together and cuts them again in proportion to the pipelines' micro-batches, so
`batch_size` means what it means under DDP: samples of one pipeline, on average. All ranks of a
pipeline load the same samples. Nothing is repeated or dropped: the last iteration is just smaller,
and a pipeline that gets nothing of it still takes part.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler

from lightning_hetero.core.batches import EmptyBatch
from lightning_hetero.core.errors import ConfigurationError

__all__ = ["DealtBatchSampler", "DealtIterable", "deal_out"]


def deal_out(
    dataloader: object,
    *,
    shares: Sequence[int],
    pipeline_index: int | None,
    seed: int,
    num_batches: int | None = None,
) -> object:
    """Return a loader of one pipeline's part of each iteration.

    Args:
        dataloader: What the user returned; loads the same order on every rank.
        shares: Relative number of samples of each pipeline.
        pipeline_index: This rank's pipeline, None if it is idle.
        seed: Seeds samplers that draw from the global generators, the same on all ranks.
        num_batches: Batches of the loader that make an iteration; None takes one a pipeline. A
            stream gives one a pipeline whatever is said here, since its batches stay whole.

    Raises:
        ConfigurationError: The loader shards by rank itself.
    """
    if getattr(dataloader, "deals_by_pipeline", False):
        return dataloader
    batch_sampler = getattr(dataloader, "batch_sampler", None)
    for source in (dataloader, batch_sampler):
        _refuse_rank_sampler(getattr(source, "sampler", None))
    if not isinstance(dataloader, DataLoader) or _is_stream(dataloader):
        if not isinstance(dataloader, Iterable):
            return dataloader
        # What a pipeline without micro-batches were given, no one would compute.
        working = [index for index, share in enumerate(shares) if share]
        place = working.index(pipeline_index) if pipeline_index in working else None
        return DealtIterable(dataloader, num_pipelines=len(working), pipeline_index=place)
    inner: Any = dataloader.batch_sampler
    records_indices = isinstance(inner, _IndexBatchSamplerWrapper)
    sampler: Any = DealtBatchSampler(
        inner._batch_sampler if records_indices else inner,
        shares=shares,
        pipeline_index=pipeline_index,
        seed=seed,
        num_batches=num_batches,
    )
    # For prediction Lightning wraps the batch sampler to record indices: keep that outermost.
    return _with_batch_sampler(dataloader, type(inner)(sampler) if records_indices else sampler)


def _is_stream(dataloader: DataLoader[Any]) -> bool:
    return isinstance(dataloader.dataset, IterableDataset) or dataloader.batch_sampler is None


def _refuse_rank_sampler(sampler: object) -> None:
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise ConfigurationError(
            f"The data loader has a DistributedSampler over {sampler.num_replicas} replicas, so "
            "the stages of a pipeline would see different samples. Give an ordinary sampler: "
            "HeteroStrategy deals the batches out to the pipelines."
        )


def _with_batch_sampler(dataloader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """Return a loader of the same class that differs in its batch sampler."""
    options: dict[str, Any] = {
        "num_workers": dataloader.num_workers,
        "pin_memory": dataloader.pin_memory,
        "timeout": dataloader.timeout,
        "worker_init_fn": dataloader.worker_init_fn,
        "multiprocessing_context": dataloader.multiprocessing_context,
        "generator": dataloader.generator,
        "prefetch_factor": dataloader.prefetch_factor,
        "persistent_workers": dataloader.persistent_workers,
    }
    collate = _CollateOrEmpty(dataloader.collate_fn)
    return type(dataloader)(
        dataloader.dataset, batch_sampler=sampler, collate_fn=collate, **options
    )


class _CollateOrEmpty:
    """The user's collate function, and an `EmptyBatch` where there are no samples."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        return self._collate(samples) if samples else EmptyBatch()


class DealtBatchSampler(Sampler[list[int]]):
    """One pipeline's part of every iteration, as lists of sample indices.

    Args:
        batch_sampler: The user's, the same on every rank.
        shares: Relative number of samples of each pipeline.
        pipeline_index: This rank's pipeline, None if it is idle.
        seed: Seeds samplers that draw from torch's global generator.
        num_batches: The user's batches that make an iteration; None takes one a pipeline.
    """

    def __init__(
        self,
        batch_sampler: Any,
        *,
        shares: Sequence[int],
        pipeline_index: int | None,
        seed: int,
        num_batches: int | None = None,
    ) -> None:
        self._batch_sampler = batch_sampler
        self._num_batches = num_batches or len(shares)
        self._shares = tuple(shares)
        self._pipeline_index = pipeline_index
        self._seed = seed
        self._epoch = 0

    @property
    def sampler(self) -> "DealtBatchSampler":
        """Itself: Lightning calls `set_epoch` of a batch sampler's `sampler` only."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Draw another order; called at the start of every epoch."""
        self._epoch = epoch
        for inner in (self._batch_sampler, getattr(self._batch_sampler, "sampler", None)):
            set_epoch = getattr(inner, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)

    @property
    def batch_size(self) -> int | None:
        """Samples of one pipeline on average."""
        return getattr(self._batch_sampler, "batch_size", None)

    @property
    def drop_last(self) -> bool:
        """Whether the user's sampler drops an incomplete batch."""
        return bool(getattr(self._batch_sampler, "drop_last", False))

    def __len__(self) -> int:
        return -(-len(self._batch_sampler) // self._num_batches)

    def __iter__(self) -> Iterator[list[int]]:
        batches = iter(self._drawn())
        while group := list(islice(batches, self._num_batches)):
            yield self._own_part(list(chain.from_iterable(group)))

    def _drawn(self) -> Iterator[list[int]]:
        """Yield the user's batches, with torch's generator seeded alike on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed + self._epoch)
            sampler = getattr(self._batch_sampler, "sampler", None)
            if isinstance(sampler, StatefulRandomSampler):
                # Seeded by chance when it was made, and its order hangs on the epochs before.
                sampler.generator.manual_seed(self._seed + self._epoch)
            batches = iter(self._batch_sampler)
            batch = next(batches, None)
        # By `next` alone: some samplers are iterators that start again when asked for one.
        while batch is not None:
            yield batch
            batch = next(batches, None)

    def _own_part(self, samples: list[int]) -> list[int]:
        if self._pipeline_index is None:
            return []
        total = sum(self._shares)
        before = sum(self._shares[: self._pipeline_index])
        start = len(samples) * before // total
        stop = len(samples) * (before + self._shares[self._pipeline_index]) // total
        return samples[start:stop]


class DealtIterable:
    """A stream of batches, dealt out one by one: pipeline j of D takes every D-th from the j-th.

    Args:
        stream: The user's loader; yields the same batches on every rank.
        num_pipelines: D.
        pipeline_index: This rank's pipeline, None if it is idle.
    """

    def __init__(
        self, stream: Iterable[Any], *, num_pipelines: int, pipeline_index: int | None
    ) -> None:
        self._stream = stream
        self._num_pipelines = num_pipelines
        self._pipeline_index = pipeline_index

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._stream)
        while group := list(islice(batches, self._num_pipelines)):
            index = self._pipeline_index
            yield group[index] if index is not None and index < len(group) else EmptyBatch()
