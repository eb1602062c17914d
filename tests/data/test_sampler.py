from typing import Any

import lightning as L
import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_hetero.core.errors import CheckpointError, ConfigurationError
from lightning_hetero.data.dealing import Deal, deal_out
from lightning_hetero.data.sampler import TwoStageBatchSampler
from tests.data.rows import Collects, Rows, indices, lengths_of
from tests.processes import ProcessPool
from tests.toy import quiet

LENGTHS = lengths_of(120)


def sampler(rank: int = 0, num_ranks: int = 1, **options: Any) -> TwoStageBatchSampler:
    fields = {"tokens_per_step": 160, "ranks": (rank, num_ranks)} | options
    return TwoStageBatchSampler(LENGTHS, **fields)


def test_ranks_share_every_step_evenly_by_cost() -> None:
    ranks = [list(sampler(rank, 3)) for rank in range(3)]
    assert {len(steps) for steps in ranks} == {len(sampler(0, 3))}
    assert sorted(i for steps in ranks for step in steps for i in step) == list(range(120))
    for parts in zip(*ranks, strict=True):
        tokens = [sum(LENGTHS[i] for i in part) for part in parts]
        longest = max(LENGTHS[i] for part in parts for i in part)
        assert max(tokens) - min(tokens) <= longest


def test_epochs_differ_and_begin_when_lightning_says() -> None:
    whole = sampler()
    first, second = list(whole), list(whole)
    assert first != second
    again = sampler()
    again.sampler.set_epoch(1)
    assert list(again) == second


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_goes_on_with_what_it_has_not_given(num_workers: int) -> None:
    def loader() -> Any:
        return StatefulDataLoader(
            Rows(LENGTHS),
            batch_sampler=sampler(seed=4),
            collate_fn=indices,
            num_workers=num_workers,
        )

    expected = list(loader())
    whole = loader()
    batches = iter(whole)
    given = [next(batches) for _ in range(3)]
    resumed = loader()
    resumed.load_state_dict(whole.state_dict())
    assert given + list(resumed) == expected


def test_another_number_of_ranks_goes_on_with_the_unseen_samples() -> None:
    two = [sampler(rank, 2, seed=4) for rank in range(2)]
    steps = [iter(item) for item in two]
    seen = [i for _ in range(4) for step in steps for i in next(step)]
    assert two[0].state_dict() == two[1].state_dict()
    for rank in range(3):
        three = sampler(rank, 3, seed=4)
        three.load_state_dict(two[0].state_dict())
        seen += [i for step in three for i in step]
    assert sorted(seen) == list(range(120))


@pytest.mark.parametrize("option", [{"seed": 5}, {"tokens_per_step": 320}])
def test_a_state_of_another_order_or_budget_is_refused(option: dict[str, int]) -> None:
    with pytest.raises(CheckpointError, match=r"the same seed, .* and tokens_per_step"):
        sampler(**option).load_state_dict(sampler().state_dict())


def test_impossible_ranks_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="global rank"):
        sampler(2, 2)
    few = TwoStageBatchSampler([3, 4], tokens_per_step=10, ranks=(0, 3))
    with pytest.raises(ConfigurationError, match="one a rank"):
        len(few)


def train_under_ddp(rank: int) -> list[list[int]]:
    module = Collects()
    batches = TwoStageBatchSampler(LENGTHS, tokens_per_step=160, seed=2)
    trainer = L.Trainer(
        **quiet(devices=2, strategy="ddp", max_epochs=2), use_distributed_sampler=False
    )
    trainer.fit(module, DataLoader(Rows(LENGTHS), batch_sampler=batches, collate_fn=indices))
    return module.seen


@pytest.mark.dist
def test_ddp_trains_every_sample_once_an_epoch(pool: ProcessPool) -> None:
    ranks = pool.run(train_under_ddp, 2)
    expected = [sampler(rank, 2, seed=2) for rank in range(2)]
    assert ranks == [[*list(item), *list(item)] for item in expected]
    steps = len(expected[0])
    for epoch in range(2):
        seen = [i for steps_of in ranks for s in steps_of[epoch * steps :][:steps] for i in s]
        assert sorted(seen) == list(range(120))


def test_a_strategy_that_deals_by_pipeline_refuses_a_sampler_that_deals_by_rank() -> None:
    def deal(ranks: int) -> Any:
        loader = DataLoader(Rows(LENGTHS), batch_sampler=sampler(0, ranks), collate_fn=indices)
        deal_one = Deal(shares=(1,), pipeline_index=0)
        return deal_out(loader, deal_at=lambda _: deal_one, num_batches=1, seed=0)

    assert len(deal(1)) == len(sampler())
    with pytest.raises(ConfigurationError, match="HeteroDataModule"):
        deal(2)
