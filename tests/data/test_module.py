"""The data module and the sampler under ordinary Trainers: accounting, resuming, validation."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_hetero.core.errors import CheckpointError, ConfigurationError
from lightning_hetero.data import HeteroDataModule, TwoStageBatchSampler
from lightning_hetero.models import PackedBatch
from tests.data.rows import Collects, Rows, RowStream, indices, lengths_of
from tests.processes import ProcessPool
from tests.toy import quiet

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"
)
LENGTHS = lengths_of(60)
streams = pytest.mark.parametrize("stream", [False, True])


def data(*, stream: bool = False, **options: Any) -> HeteroDataModule:
    fields: dict[str, Any] = {"tokens_per_step": 80, "context_length": 40, "seed": 3}
    fields |= {"collate": indices, "num_ahead": 0}
    if not stream:
        fields |= {"lengths": LENGTHS}
    dataset = RowStream(LENGTHS) if stream else Rows(LENGTHS)
    return HeteroDataModule(dataset, **(fields | options))


class Estimates(Collects):
    """Asks for the number of steps before a checkpoint is read, as schedulers do."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def fit(
    datamodule: HeteroDataModule, checkpoint: Path | None = None, **options: Any
) -> list[list[int]]:
    module = Collects() if checkpoint is None else Estimates()
    trainer = L.Trainer(**quiet(max_epochs=2, devices=1) | options)
    trainer.fit(module, datamodule, ckpt_path=checkpoint, weights_only=False)
    return module.seen


class Saves(L.Callback):
    """Saves a checkpoint after every step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


@pytest.mark.parametrize(
    ("stream", "options"),
    [(False, {}), (True, {}), (True, {"reload_dataloaders_every_n_epochs": 1})],
)
def test_a_run_resumed_after_any_step_sees_what_the_whole_run_sees(
    tmp_path: Path, *, stream: bool, options: dict[str, Any]
) -> None:
    whole = fit(data(stream=stream), callbacks=[Saves(tmp_path)], **options)
    steps = 1 + [sum(map(len, whole[: n + 1])) for n in range(len(whole))].index(60)
    for epoch in (whole[:steps], whole[steps:]):
        assert sorted(i for batch in epoch for i in batch) == list(range(60))
    assert stream or whole[:steps] != whole[steps:]
    for step in (1, steps - 1, steps, steps + 1):
        workers = 2 if step == steps + 1 else 0
        again = data(stream=stream, num_workers=workers)
        assert whole[:step] + fit(again, tmp_path / f"{step}.ckpt", **options) == whole, step


@streams
def test_another_budget_cuts_what_is_left_of_a_stream_and_is_refused_where_an_epoch_has_a_length(
    tmp_path: Path, *, stream: bool
) -> None:
    first = fit(data(stream=stream), callbacks=[Saves(tmp_path)])[:3]
    for budget in (40, 200):
        again = data(stream=stream, tokens_per_step=budget)
        if not stream:
            with pytest.raises(CheckpointError, match=f"80.*{budget}.*same.*tokens_per_step"):
                fit(again, tmp_path / "3.ckpt")
            continue
        rest = fit(again, tmp_path / "3.ckpt")
        assert max(sum(LENGTHS[i] for i in batch) for batch in rest) <= budget
        assert sorted(i for batch in first + rest for i in batch) == sorted([*range(60)] * 2)


def test_a_new_run_starts_afresh_limits_end_an_epoch_early_and_overfitting_repeats() -> None:
    datamodule = data()
    first = fit(datamodule, max_epochs=1, limit_train_batches=3)
    again = fit(datamodule, limit_train_batches=3)
    assert again[:3] == first
    whole = data()
    whole.setup("fit")
    loader = whole.train_dataloader()
    loader.batch_sampler.sampler.set_epoch(1)
    assert again[3:] == list(loader)[:3]
    seen = fit(data(), overfit_batches=2)
    assert len(seen) == 4
    assert seen[:2] == seen[2:]


def test_validation_takes_every_sample_once_in_order_each_time() -> None:
    passes: list[list[int]] = []
    module = Collects()
    module.validation_step = lambda batch, batch_idx: passes.append(batch)  # type: ignore[assignment]
    trainer = L.Trainer(**quiet(max_epochs=2, devices=1, num_sanity_val_steps=2))
    trainer.fit(module, data(val_dataset=Rows(LENGTHS)))
    half = len(passes[2:]) // 2
    assert passes[2:][:half] == passes[2:][half:]
    assert [i for batch in passes[2:][:half] for i in sorted(batch)] == list(range(60))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_planned_ahead_and_fetched_ahead_without_counting(num_workers: int) -> None:
    datamodule = data(num_workers=num_workers, num_ahead=6)
    datamodule.setup("fit")
    batches = iter(datamodule.train_dataloader())
    given = [next(batches) for _ in range(3)]
    state = datamodule.state_dict()
    assert state["cursor"]["num_samples"] == sum(map(len, given))
    assert state["cursor"]["num_iterations"] == 3
    # What is planned already stays: other costs hold from an iteration on that lies ahead.
    assert datamodule.set_slowdowns([1.0]) > 3
    assert datamodule.planning_stall_s >= 0.0
    resumed = data()
    resumed.setup("fit")
    resumed.load_state_dict(state)
    assert list(resumed.train_dataloader()) == list(batches)
    datamodule.teardown("fit")


@pytest.mark.parametrize("on_overlong", ["cut", "split"])
def test_samples_are_packed_by_default(on_overlong: str) -> None:
    datamodule = data(collate=None, context_length=16, on_overlong=on_overlong)
    datamodule.setup("fit")
    batches = list(datamodule.train_dataloader())
    assert all(isinstance(batch, PackedBatch) for batch in batches)
    tokens = sum(LENGTHS if on_overlong == "split" else [min(n, 16) for n in LENGTHS])
    assert sum(batch.num_tokens for batch in batches) == datamodule.sample_lengths().sum() == tokens
    assert max(batch.max_seqlen for batch in batches) <= 16
    assert data(stream=True).sample_lengths().max() <= 40


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one whole context"):
        data(tokens_per_step=30)
    with pytest.raises(ConfigurationError, match="isn't made yet"):
        data().set_slowdowns([1.0])


def train_under_ddp(rank: int) -> list[list[list[int]]]:
    """Train two epochs on a data module, on a stream, and on a sampler's loader."""
    seen = [
        fit(data(stream=stream, num_ahead=3), devices=2, strategy="ddp") for stream in (False, True)
    ]
    module = Collects()
    sampler = TwoStageBatchSampler(LENGTHS, tokens_per_step=80, seed=2)
    loader = DataLoader(Rows(LENGTHS), batch_sampler=sampler, collate_fn=indices)
    options = quiet(devices=2, strategy="ddp", max_epochs=2)
    L.Trainer(**options, use_distributed_sampler=False).fit(module, loader)
    return [*seen, module.seen]


@pytest.mark.dist
def test_ddp_trains_every_sample_once_an_epoch_in_even_parts(pool: ProcessPool) -> None:
    for ranks in zip(*pool.run(train_under_ddp, 2), strict=True):
        assert len(ranks[0]) == len(ranks[1])
        half = len(ranks[0]) // 2
        for epoch in (slice(half), slice(half, None)):
            assert sorted(i for seen in ranks for b in seen[epoch] for i in b) == list(range(60))
        for parts in zip(*ranks, strict=True):
            tokens = [sum(LENGTHS[i] for i in part) for part in parts]
            assert abs(tokens[0] - tokens[1]) <= max(LENGTHS[i] for p in parts for i in p)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_of_a_sampler_goes_on_with_what_it_has_not_given(
    num_workers: int,
) -> None:
    def loader() -> Any:
        sampler = TwoStageBatchSampler(LENGTHS, tokens_per_step=80, seed=4)
        assert len(sampler) == len(list(sampler))
        sampler.set_epoch(0)
        return StatefulDataLoader(
            Rows(LENGTHS), batch_sampler=sampler, collate_fn=indices, num_workers=num_workers
        )

    expected = list(loader())
    whole = loader()
    batches = iter(whole)
    given = [next(batches) for _ in range(3)]
    resumed = loader()
    resumed.load_state_dict(whole.state_dict())
    assert given + list(resumed) == expected
    other = TwoStageBatchSampler(LENGTHS, tokens_per_step=80, seed=5)
    with pytest.raises(CheckpointError, match="the same seed"):
        other.load_state_dict(whole.batch_sampler.state_dict())
