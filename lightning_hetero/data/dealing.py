"""Deal the batches of an ordinary data loader out to pipelines.

Every rank reads the same order of samples. An iteration takes D consecutive batches for D
pipelines, joins them and divides their samples in proportion to the pipelines' micro-batches, times
`microbatch_size` if the plan has it. So `batch_size` has the same meaning as under DDP: samples of
one pipeline, on average. All ranks of a pipeline load the same samples. No sample is repeated or
dropped: the last iteration may be smaller, and a pipeline without samples still takes part in it.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import torch
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.data.orders import Order, peek, size_of
from lightning_hetero.data.sampler import TwoStageBatchSampler
from lightning_hetero.models.batches import EmptyBatch


@dataclass(frozen=True, kw_only=True)
class Deal:
    """How an iteration's samples are divided among pipelines, and one rank's pipeline."""

    shares: tuple[int, ...]
    """Samples of each pipeline, relative to each other: (2, 1) gives the first pipeline two
    thirds."""
    pipeline_index: int | None
    """This rank's pipeline, None if it is idle."""


def deal_of(plan: ParallelPlan, *, global_rank: int, num_microbatches: int) -> Deal:
    """Return a rank's deal under a plan: samples in proportion to micro-batches and their sizes.

    Args:
        plan: The plan.
        global_rank: The rank.
        num_microbatches: Micro-batches of pipelines for which the plan names no number.
    """
    place = plan.place(global_rank)
    return Deal(
        shares=tuple(
            count * (pipeline.microbatch_size or 1)
            for count, pipeline in zip(
                plan.count_microbatches(num_microbatches), plan.pipelines, strict=True
            )
        ),
        pipeline_index=None if place is None else place.pipeline_index,
    )


_DealAt = Callable[[int], Deal]
"""Returns the deal of the n-th iteration of a pass, right before it is dealt; 0 begins a pass."""


def deal_out(dataloader: object, *, deal_at: _DealAt, num_batches: int, seed: int) -> object:
    """Return a loader of one pipeline's part of each iteration.

    Args:
        dataloader: The user's loader, with the same order on every rank; returned as it is if it
            deals by pipeline itself, or can't be iterated.
        deal_at: Returns the deal of the n-th iteration of a pass, when it is dealt.
        num_batches: Batches of the loader in an iteration. Not used for streams, whose batches
            stay whole: they give one to each pipeline.
        seed: Seed of samplers that draw from the global generators, the same on all ranks.

    Raises:
        ConfigurationError: The loader already divides samples among ranks.
    """
    if getattr(dataloader, "deals_by_pipeline", False):
        return dataloader
    batch_sampler = getattr(dataloader, "batch_sampler", None)
    for source in (dataloader, batch_sampler):
        _refuse_rank_sampler(getattr(source, "sampler", None))
    if not isinstance(dataloader, DataLoader) or _is_stream(dataloader):
        if not isinstance(dataloader, Iterable):
            return dataloader
        return DealtIterable(dataloader, deal_at=deal_at)
    inner: Any = dataloader.batch_sampler
    records_indices = isinstance(inner, _IndexBatchSamplerWrapper)
    sampler: Any = DealtBatchSampler(
        inner._batch_sampler if records_indices else inner,
        deal_at=deal_at,
        num_batches=num_batches,
        seed=seed,
        dataset=dataloader.dataset,
    )
    # For prediction Lightning wraps the batch sampler to record indices: keep that outermost.
    return _with_batch_sampler(dataloader, type(inner)(sampler) if records_indices else sampler)


def _is_stream(dataloader: DataLoader[Any]) -> bool:
    return isinstance(dataloader.dataset, IterableDataset) or dataloader.batch_sampler is None


def _refuse_rank_sampler(sampler: object) -> None:
    if isinstance(sampler, DistributedSampler | TwoStageBatchSampler) and sampler.num_replicas > 1:
        raise ConfigurationError(
            f"The data loader has a {type(sampler).__name__} over {sampler.num_replicas} replicas, "
            "so the stages of a pipeline would see different samples. Give an ordinary sampler, "
            "whose batches HeteroStrategy deals out to the pipelines, or HeteroDataModule."
        )


def _with_batch_sampler(dataloader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """Return a loader with another batch sampler, of the same class (stateful if it is torch's)."""
    names = (
        *("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
        *("generator", "prefetch_factor", "persistent_workers"),
    )
    options: dict[str, Any] = {name: getattr(dataloader, name) for name in names}
    collate = _CollateOrEmpty(dataloader.collate_fn)
    # A stateful loader can be resumed inside an epoch.
    kind = StatefulDataLoader if type(dataloader) is DataLoader else type(dataloader)
    with warnings.catch_warnings():
        # On torch 2.13 torchdata itself uses a deprecated function, which users can't change.
        warnings.filterwarnings("ignore", message=".*set_vital.*")
        return kind(dataloader.dataset, batch_sampler=sampler, collate_fn=collate, **options)


class _CollateOrEmpty:
    """The user's collate function; makes an `EmptyBatch` of no samples."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        return self._collate(samples) if samples else EmptyBatch()


class DealtBatchSampler(Sampler[list[int]]):
    """One pipeline's part of every iteration, as lists of sample indices.

    Args:
        batch_sampler: The user's batch sampler, the same on every rank.
        deal_at: Returns the deal of the n-th iteration of a pass, when it is dealt.
        num_batches: The user's batches in an iteration.
        seed: Seed of samplers that draw from torch's global generator.
        dataset: What the indices are of.
    """

    def __init__(
        self,
        batch_sampler: Any,
        *,
        deal_at: _DealAt,
        num_batches: int,
        seed: int,
        dataset: object = None,
    ) -> None:
        self._batch_sampler = batch_sampler
        self._deal_at = deal_at
        self._num_batches = num_batches
        self._dataset = dataset
        self.loader = ""
        """Which of the run's loaders it is for."""
        self.new_order: Order | None = None
        """What the pass over the loader that has just begun is about to read; None once ranks have
        compared it (`orders`)."""
        self.seed = seed
        """Seed of all epochs' orders; after a resume, that of the saved run."""
        self.epoch = 0
        """The epoch whose order is drawn."""

    @property
    def sampler(self) -> "DealtBatchSampler":
        """Itself: Lightning calls `set_epoch` only of a batch sampler's `sampler`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order to draw; Lightning calls it at the start of every epoch."""
        self.epoch = epoch
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

    def __iter__(self) -> "_DealtIterator":
        return _DealtIterator(self)

    def deal(self, batches: Iterator[list[int]]) -> Iterator[tuple[int, list[int]]]:
        """Yield each iteration's number of samples and this pipeline's part of them."""
        for iteration in count():
            group = list(islice(batches, self._num_batches))
            if not group:
                return
            samples = list(chain.from_iterable(group))
            yield len(samples), _own_part(samples, self._deal_at(iteration))

    def draw(self) -> Iterator[list[int]]:
        """Yield the user's batches, with torch's generator seeded alike on every rank."""
        with torch.random.fork_rng(devices=[]):
            # Orders are drawn on the CPU; `torch.manual_seed` would seed devices, too.
            torch.default_generator.manual_seed(self.seed + self.epoch)
            sampler = getattr(self._batch_sampler, "sampler", None)
            if isinstance(sampler, StatefulRandomSampler):
                # Its own seed is random, and its order depends on earlier epochs.
                sampler.generator.manual_seed(self.seed + self.epoch)
            digest, batches = peek(iter(self._batch_sampler), self._dataset)
            self.new_order = Order(
                self.loader, size_of(self._batch_sampler), size_of(self._dataset), digest
            )
        yield from batches


class _DealtIterator:
    """One pass over the samples, which a stateful loader saves and resumes, under any topology.

    The state's keys are those of torchdata's own batch sampler, so an unshuffled pass can also be
    resumed in a run of plain Lightning, and the other way around.
    """

    def __init__(self, sampler: DealtBatchSampler) -> None:
        self._sampler = sampler
        self._start(0)

    def _start(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._dealt = self._sampler.deal(_skip(self._sampler.draw(), num_samples))

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        count, part = next(self._dealt)
        self._num_samples += count
        return part

    def state_dict(self) -> dict[str, int]:
        """Return seed, epoch, and the number of its samples that all pipelines were given."""
        return {
            "seed": self._sampler.seed,
            "epoch": self._sampler.epoch,
            "samples_yielded": self._num_samples,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume after the samples that were given when the state was saved, in its order.

        States of plain Lightning have neither seed nor epoch; then this run's own are used.
        """
        self._sampler.seed = state.get("seed", self._sampler.seed)
        self._sampler.set_epoch(state.get("epoch", self._sampler.epoch))
        self._start(state["samples_yielded"])


def _skip(batches: Iterator[list[int]], num_samples: int) -> Iterator[list[int]]:
    """Yield batches without the first `num_samples` samples of all."""
    for batch in batches:
        if num_samples < len(batch):
            yield batch[num_samples:]
        num_samples = max(0, num_samples - len(batch))


def _own_part(samples: list[int], deal: Deal) -> list[int]:
    if deal.pipeline_index is None:
        return []
    total = sum(deal.shares)
    before = sum(deal.shares[: deal.pipeline_index])
    start = len(samples) * before // total
    stop = len(samples) * (before + deal.shares[deal.pipeline_index]) // total
    return samples[start:stop]


class DealtIterable:
    """A stream of batches, dealt one by one: pipeline j of D takes every D-th from the j-th on.

    A pipeline without micro-batches isn't counted and gets none.

    Args:
        stream: The user's loader; yields the same batches on every rank.
        deal_at: Returns the deal of the n-th iteration of a pass, when it is dealt.
    """

    def __init__(self, stream: Iterable[Any], *, deal_at: _DealAt) -> None:
        self._stream = stream
        self._deal_at = deal_at
        self.loader = ""
        """Which of the run's loaders it is."""
        self.new_order: Order | None = None
        """What the pass over the loader that has just begun is about to read; None once ranks have
        compared it (`orders`)."""

    def __iter__(self) -> Iterator[Any]:
        self.new_order = Order(self.loader, size_of(self._stream), None, digest=0)
        batches = iter(self._stream)
        for iteration in count():
            deal = self._deal_at(iteration)
            working = [index for index, share in enumerate(deal.shares) if share]
            group = list(islice(batches, len(working)))
            if not group:
                return
            parts = dict(zip(working, group, strict=False))
            yield (
                EmptyBatch()
                if deal.pipeline_index is None
                else parts.get(deal.pipeline_index, EmptyBatch())
            )
