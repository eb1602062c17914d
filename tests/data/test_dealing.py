"""Laws of dealing batches out to pipelines."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
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

from lightning_hetero.core.errors import ConfigurationError, PlanError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.data.dealing import Deal, DealtBatchSampler, DealtIterable, deal_of, deal_out
from lightning_hetero.models.batches import EmptyBatch

shares_lists = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any)


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
@settings(deadline=None)
def test_every_sample_is_dealt_once_and_in_order(
    num_samples: int, batch_size: int, shares: list[int], *, drop_last: bool
) -> None:
    inner = sequential(num_samples, batch_size, drop_last=drop_last)
    parts = all_parts(inner, shares)
    found = [index for iteration in parts for part in iteration for index in part]
    assert found == [index for batch in inner for index in batch]
    assert all(len(dealt(inner, shares, index)) == len(parts) for index in range(len(shares)))


@given(batch_size=st.integers(1, 7), shares=shares_lists, num_iterations=st.integers(1, 3))
@settings(deadline=None)
def test_shares_are_kept_to_one_sample(
    batch_size: int, shares: list[int], num_iterations: int
) -> None:
    per_iteration = batch_size * len(shares)
    inner = sequential(per_iteration * num_iterations, batch_size)
    for iteration in all_parts(inner, shares):
        assert sum(len(part) for part in iteration) == per_iteration
        for part, share in zip(iteration, shares, strict=True):
            assert abs(len(part) - per_iteration * share / sum(shares)) < 1
            if share == 0:
                assert part == []


def test_an_iteration_is_that_of_one_device_with_all_batches_together() -> None:
    parts = all_parts(sequential(20, 3), [1, 2, 3])
    one_device = list(sequential(20, 9))
    assert [[i for part in iteration for i in part] for iteration in parts] == one_device


def test_an_idle_rank_gets_nothing_of_each_iteration() -> None:
    inner = sequential(10, 2)
    assert list(dealt(inner, [1, 1], None)) == [[], [], []]


def shuffled(num_samples: int) -> BatchSampler:
    return BatchSampler(RandomSampler(range(num_samples)), 4, drop_last=False)


def order_on_rank(rank_seed: int, epoch: int | None, index: int) -> list[list[int]]:
    torch.manual_seed(rank_seed)
    sampler = dealt(shuffled(32), [1, 1], index, seed=5)
    if epoch is not None:
        sampler.sampler.set_epoch(epoch)
    return list(sampler)


def test_ranks_shuffle_alike_whatever_their_generators() -> None:
    for epoch in (None, 0, 1):
        assert order_on_rank(1, epoch, 0) == order_on_rank(2, epoch, 0)
        both = order_on_rank(1, epoch, 0) + order_on_rank(2, epoch, 1)
        assert sorted(i for part in both for i in part) == list(range(32))


def test_another_epoch_is_another_order() -> None:
    assert order_on_rank(1, 0, 0) == order_on_rank(1, None, 0)
    assert order_on_rank(1, 0, 0) != order_on_rank(1, 1, 0)


def test_drawing_leaves_the_global_generator_and_those_of_devices_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    list(dealt(shuffled(32), [1], 0))
    assert torch.equal(before, torch.get_rng_state())
    assert seeds == []


def test_a_users_sampler_hears_of_the_epoch() -> None:
    class Own(SequentialSampler):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    sampler = dealt(BatchSampler(Own(range(4)), 2, drop_last=False), [1], 0)
    sampler.set_epoch(7)
    assert Own.epochs == [7]


class ByLength:
    """A batch sampler of the user's, with batches of different sizes and no `sampler`."""

    def __init__(self) -> None:
        self.batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9]]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def test_custom_batch_samplers_are_dealt_too() -> None:
    assert all_parts(ByLength(), [1, 1]) == [([0, 1], [2, 3]), ([4, 5, 6], [7, 8, 9])]


class Restarting(ByLength):
    """An iterator that starts again whenever it is asked for one."""

    def __iter__(self) -> Iterator[list[int]]:
        self.place = 0
        return self

    def __next__(self) -> list[int]:
        self.place += 1
        if self.place > len(self.batches):
            raise StopIteration
        return self.batches[self.place - 1]


def test_a_batch_sampler_that_restarts_is_read_once() -> None:
    assert all_parts(Restarting(), [1, 1]) == all_parts(ByLength(), [1, 1])


def test_lightnings_record_of_predicted_indices_stays_outermost() -> None:
    recorder = _IndexBatchSamplerWrapper(sequential(9, 2))
    loader = DataLoader(Numbers(9), batch_sampler=recorder)
    dealt_loader: Any = deal(loader, [1, 1], 1)
    assert values(dealt_loader) == [[2, 3], [6, 7], [8]]
    assert dealt_loader.batch_sampler.seen_batch_indices == [[2, 3], [6, 7], [8]]


def values(batches: Any) -> list[Any]:
    return [None if isinstance(batch, EmptyBatch) else batch.tolist() for batch in batches]


class Numbers:
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def loader_of(
    num_samples: int, shares: list[int], index: int | None, **options: Any
) -> DataLoader[Any]:
    loader = DataLoader(Numbers(num_samples), **options)
    result = deal(loader, shares, index)
    assert isinstance(result, DataLoader)
    return result


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_load_their_pipelines_part(num_workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 2, "num_workers": num_workers}
    assert values(loader_of(9, [1, 1], 0, **options)) == [[0, 1], [4, 5], None]
    assert values(loader_of(9, [1, 1], 1, **options)) == [[2, 3], [6, 7], [8]]
    assert values(loader_of(9, [1, 1], None, **options)) == [None, None, None]
    assert len(loader_of(9, [1, 1], 0, **options)) == 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_shuffled_loaders_agree_and_reshuffle(num_workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 3, "num_workers": num_workers, "shuffle": True}
    orders = []
    for epoch in range(2):
        parts = []
        for index in range(2):
            torch.manual_seed(index)
            loader = loader_of(24, [1, 2], index, **options)
            loader.batch_sampler.sampler.set_epoch(epoch)
            parts.append([i for batch in values(loader) for i in batch])
        assert sorted(parts[0] + parts[1]) == list(range(24))
        orders.append(parts)
    assert orders[0] != orders[1]


# torchdata calls what torch has deprecated.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("num_workers", [0, 2])
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


def test_a_state_without_a_seed_goes_on_in_the_order_of_this_run() -> None:
    iterator = iter(dealt(shuffled(32), [1], 0, seed=5))
    iterator.load_state_dict({"samples_yielded": 4})
    assert list(iterator) == list(dealt(shuffled(32), [1], 0, seed=5))[1:]


def test_dealing_warns_of_nothing_that_a_user_could_mend() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deal(DataLoader(Numbers(4)), [1], 0)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(10))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_streams_are_dealt_batch_by_batch(num_workers: int) -> None:
    loader = DataLoader(Stream(), batch_size=2, num_workers=num_workers)
    parts = [values(deal(loader, [1, 1], index)) for index in (0, 1)]
    assert parts == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], None]]


def test_an_iterable_that_is_no_loader_is_dealt() -> None:
    loader = deal([1, 2, 3], [1, 1], 0)
    assert isinstance(loader, DealtIterable)
    assert list(loader) == [1, 3]


def test_a_stream_gives_a_pipeline_without_share_nothing() -> None:
    parts = [list(deal([1, 2, 3], [0, 2], index)) for index in (0, 1, None)]
    assert parts[1] == [1, 2, 3]
    assert all(isinstance(batch, EmptyBatch) for batch in parts[0] + parts[2])


def test_a_sampler_that_shards_by_rank_is_refused() -> None:
    sampler = DistributedSampler(Numbers(8), num_replicas=2, rank=1)  # type: ignore[var-annotated]
    loader = DataLoader(Numbers(8), batch_size=2, sampler=sampler)
    with pytest.raises(ConfigurationError, match="DistributedSampler over 2 replicas"):
        deal(loader, [1, 1], 0)


def test_a_sharding_sampler_inside_a_batch_sampler_is_refused() -> None:
    sampler = DistributedSampler(Numbers(8), num_replicas=2, rank=1)  # type: ignore[var-annotated]
    loader = DataLoader(Numbers(8), batch_sampler=BatchSampler(sampler, 2, drop_last=False))
    with pytest.raises(ConfigurationError, match="DistributedSampler over 2 replicas"):
        deal(loader, [1, 1], 0)


def test_a_loader_that_deals_itself_is_left_alone() -> None:
    class Own:
        deals_by_pipeline = True

    own = Own()
    assert deal(own, [1], 0) is own


def test_dealing_keeps_the_loaders_options() -> None:
    def collate(samples: list[Any]) -> Any:
        return torch.stack(samples) * 10

    loader = loader_of(4, [1], 0, batch_size=2, collate_fn=collate)
    assert values(loader) == [[0, 10], [20, 30]]
    assert loader.batch_sampler.batch_size == 2
    assert loader.batch_sampler.drop_last is False


def test_samples_follow_the_sizes_of_microbatches() -> None:
    def sized(size: int) -> ParallelPlan:
        pipelines = [
            {"stages": [{"ranks": [0], "layers": [0, 2]}], "num_microbatches": 3},
            {"stages": [{"ranks": [1], "layers": [0, 2]}], "microbatch_size": size},
        ]
        return ParallelPlan.from_dict({"pipelines": pipelines})

    plan = sized(5)
    assert deal_of(plan, global_rank=1, num_microbatches=2) == Deal(
        shares=(3, 10), pipeline_index=1
    )
    assert ParallelPlan.from_json(plan.to_json()) == plan
    assert "- × 5" in str(plan)
    with pytest.raises(PlanError, match="microbatch_size is 0; it must be 1 or more"):
        sized(0)
