"""Laws of dealing batches out to pipelines, and of which plan they are dealt for."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.data import TwoStageBatchSampler
from lightning_hetero.data.dealer import Dealer
from lightning_hetero.data.dealing import Deal, DealtBatchSampler, deal_of, deal_out
from lightning_hetero.models.batches import AssignedBatch, EmptyBatch

shares_lists = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any)
in_workers = pytest.mark.parametrize("num_workers", [0, 2])


def sequential(num_samples: int, batch_size: int, *, drop_last: bool = False) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(num_samples)), batch_size, drop_last=drop_last)


def always(shares: list[int], index: int | None) -> Callable[[int], Deal]:
    return lambda _: Deal(shares=tuple(shares), pipeline_index=index)


def deal(loader: Any, shares: list[int], index: int | None, seed: int = 0) -> Any:
    return deal_out(loader, deal_at=always(shares, index), num_batches=len(shares), seed=seed)


def dealt(inner: Any, shares: list[int], index: int | None, seed: int = 0) -> DealtBatchSampler:
    return DealtBatchSampler(
        inner, deal_at=always(shares, index), num_batches=len(shares), seed=seed
    )


def all_parts(inner: Any, shares: list[int]) -> list[tuple[list[int], ...]]:
    """Every pipeline's part of every iteration."""
    parts = [list(dealt(inner, shares, index)) for index in range(len(shares))]
    return list(zip(*parts, strict=True))


@given(
    num_samples=st.integers(0, 40),
    batch_size=st.integers(1, 7),
    shares=shares_lists,
    drop_last=st.booleans(),
)
def test_every_sample_is_dealt_once_in_order_as_one_device_takes_them_and_by_shares(
    num_samples: int, batch_size: int, shares: list[int], *, drop_last: bool
) -> None:
    inner = sequential(num_samples, batch_size, drop_last=drop_last)
    parts = all_parts(inner, shares)
    found = [[index for part in iteration for index in part] for iteration in parts]
    assert [i for taken in found for i in taken] == [index for batch in inner for index in batch]
    assert all(len(dealt(inner, shares, index)) == len(parts) for index in range(len(shares)))
    assert list(dealt(inner, shares, None)) == [[] for _ in parts]
    whole = batch_size * len(shares)
    assert drop_last or found == list(sequential(num_samples, whole))
    for iteration in parts:
        taken = sum(map(len, iteration))
        for part, share in zip(iteration, shares, strict=True):
            assert taken < whole or abs(len(part) - whole * share / sum(shares)) < 1
            assert share or part == []


def shuffled(num_samples: int) -> BatchSampler:
    return BatchSampler(RandomSampler(range(num_samples)), 4, drop_last=False)


def order_on_rank(rank_seed: int, epoch: int | None, index: int) -> list[list[int]]:
    torch.manual_seed(rank_seed)
    sampler = dealt(shuffled(32), [1, 1], index, seed=5)
    if epoch is not None:
        sampler.sampler.set_epoch(epoch)
    return list(sampler)


def test_ranks_shuffle_alike_whatever_their_generators_and_in_each_epoch_anew() -> None:
    for epoch in (None, 0, 1):
        assert order_on_rank(1, epoch, 0) == order_on_rank(2, epoch, 0)
        both = order_on_rank(1, epoch, 0) + order_on_rank(2, epoch, 1)
        assert sorted(i for part in both for i in part) == list(range(32))
    assert order_on_rank(1, 0, 0) == order_on_rank(1, None, 0) != order_on_rank(1, 1, 0)


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    list(dealt(shuffled(32), [1], 0))
    assert torch.equal(before, torch.get_rng_state())


def test_a_users_sampler_hears_of_the_epoch() -> None:
    class Own(SequentialSampler):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    dealt(BatchSampler(Own(range(4)), 2, drop_last=False), [1], 0).set_epoch(7)
    assert Own.epochs == [7]


class ByLength:
    """A batch sampler of the user's, with batches of different sizes and no `sampler`."""

    batches = ([0, 1, 2], [3], [4, 5], [6, 7, 8, 9])

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Restarting(ByLength):
    """An iterator that starts again whenever it is asked for one."""

    def __iter__(self) -> Iterator[list[int]]:
        self._left = iter(self.batches)
        return self

    def __next__(self) -> list[int]:
        return next(self._left)


@pytest.mark.parametrize("kind", [ByLength, Restarting])
def test_custom_batch_samplers_are_dealt_too(kind: type[ByLength]) -> None:
    assert all_parts(kind(), [1, 1]) == [([0, 1], [2, 3]), ([4, 5, 6], [7, 8, 9])]


def values(batches: Any) -> list[Any]:
    return [None if isinstance(batch, EmptyBatch) else batch.tolist() for batch in batches]


class Numbers:
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def test_lightnings_record_of_predicted_indices_stays_outermost() -> None:
    recorder = _IndexBatchSamplerWrapper(sequential(9, 2))
    loader: Any = deal(DataLoader(Numbers(9), batch_sampler=recorder), [1, 1], 1)
    assert values(loader) == [[2, 3], [6, 7], [8]]
    assert loader.batch_sampler.seen_batch_indices == [[2, 3], [6, 7], [8]]


@in_workers
def test_loaders_keep_their_options_and_load_their_pipelines_part(num_workers: int) -> None:
    def part(index: int | None) -> Any:
        options: dict[str, Any] = {"batch_size": 2, "num_workers": num_workers}
        loader = DataLoader(Numbers(9), **options, collate_fn=lambda s: torch.stack(s) * 10)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Of nothing that a user could mend.
            return deal(loader, [1, 1], index)

    parts = [part(index) for index in (0, 1, None)]
    assert [values(loader) for loader in parts] == [
        [[0, 10], [40, 50], None],
        [[20, 30], [60, 70], [80]],
        [None, None, None],
    ]
    assert len(parts[0]) == 3
    assert (parts[0].batch_sampler.batch_size, parts[0].batch_sampler.drop_last) == (2, False)


# torchdata calls what torch has deprecated.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@in_workers
def test_a_stateful_loader_stays_one_and_resumes(num_workers: int) -> None:
    def make(seed: int) -> StatefulDataLoader[Any]:
        inner = StatefulDataLoader(Numbers(40), batch_size=2, shuffle=True, num_workers=num_workers)
        result = deal(inner, [1, 1], 1, seed)
        assert isinstance(result, StatefulDataLoader)
        return result

    loader = make(seed=3)
    iterator = iter(loader)
    seen = [next(iterator).tolist() for _ in range(4)]
    state = loader.state_dict()
    rest = values(iterator)
    # Without `seed_everything` each start draws a seed of its own.
    resumed = make(seed=4)
    resumed.load_state_dict(state)
    assert values(resumed) == rest
    assert len(seen) + len(rest) == len(loader)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(10))


def test_streams_and_other_iterables_are_dealt_batch_by_batch() -> None:
    for num_workers in (0, 1):
        loader = DataLoader(Stream(), batch_size=2, num_workers=num_workers)
        parts = [values(deal(loader, [1, 1], index)) for index in (0, 1)]
        assert parts == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], None]]
    assert list(deal([1, 2, 3], [1, 1], 0)) == [1, 3]
    parts = [list(deal([1, 2, 3], [0, 2], index)) for index in (0, 1, None)]
    assert parts[1] == [1, 2, 3]
    assert all(isinstance(batch, EmptyBatch) for batch in parts[0] + parts[2])


class TwoRanks(TwoStageBatchSampler):
    num_replicas = 2  # type: ignore[assignment]


def test_samplers_that_shard_by_rank_are_refused() -> None:
    shards: Any = DistributedSampler(Numbers(8), num_replicas=2, rank=1)  # type: ignore[var-annotated]
    for options in (
        {"batch_size": 2, "sampler": shards},
        {"batch_sampler": BatchSampler(shards, 2, drop_last=False)},
        {"batch_sampler": TwoRanks([1] * 8, tokens_per_step=4)},
    ):
        with pytest.raises(ConfigurationError, match=r"over 2 replicas.*HeteroDataModule"):
            deal(DataLoader(Numbers(8), **options), [1, 1], 0)


class Assigning:
    deals_by_pipeline = True


def test_batches_that_bring_their_plan_run_under_it_and_it_is_not_changed_elsewhere() -> None:
    two, one = (
        ParallelPlan.even(world_size=2, num_layers=2, num_stages=stages) for stages in (1, 2)
    )
    dealer = Dealer(two, global_rank=0, num_microbatches=1, num_batches=2, seed=lambda: 0)
    own = Assigning()
    assert dealer.deal(own, is_training=True, epoch=0) is own
    batch = AssignedBatch(plan=one, microbatches=(), first_index=0)
    assert dealer.plan_to_run(batch, 0) is one
    with pytest.raises(ConfigurationError, match="set_candidate_plans"):
        dealer.change_plan(two, most_of_ranks=int)


def test_samples_follow_the_sizes_of_microbatches() -> None:
    pipelines = [
        {"stages": [{"ranks": [0], "layers": [0, 2]}], "num_microbatches": 3},
        {"stages": [{"ranks": [1], "layers": [0, 2]}], "microbatch_size": 5},
    ]
    plan = ParallelPlan.from_dict({"pipelines": pipelines})
    expected = Deal(shares=(3, 10), pipeline_index=1)
    assert deal_of(plan, global_rank=1, num_microbatches=2) == expected
