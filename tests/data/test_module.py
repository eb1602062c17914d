"""The data module under an ordinary Trainer on one device: accounting, resuming, validation."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.strategies import DDPStrategy

from lightning_hetero.core.errors import CheckpointError, ConfigurationError
from lightning_hetero.data import HeteroDataModule
from lightning_hetero.data.ahead import AheadPlanner
from lightning_hetero.models import PackedBatch
from tests.data.rows import Collects, Rows, RowStream, indices, lengths_of
from tests.toy import quiet

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"
)
LENGTHS = lengths_of(60)


def data(**options: Any) -> HeteroDataModule:
    fields: dict[str, Any] = {"tokens_per_step": 80, "context_length": 40, "seed": 3}
    fields |= {"collate": indices, "num_ahead": 0, "lengths": LENGTHS}
    return HeteroDataModule(Rows(LENGTHS), **(fields | options))


class Validates(Collects):
    """Keeps those of its validation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[list[int]] = []

    def validation_step(self, batch: list[int], batch_idx: int) -> None:
        self.validated.append(batch)


def fit(
    datamodule: HeteroDataModule, checkpoint: Path | None = None, **options: Any
) -> list[list[int]]:
    module = Collects()
    trainer = L.Trainer(**quiet(max_epochs=2, devices=1) | options)
    trainer.fit(module, datamodule, ckpt_path=checkpoint, weights_only=False)
    return module.seen


class Saves(L.Callback):
    """Saves a checkpoint after every step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


@pytest.mark.parametrize("options", [{}, {"reload_dataloaders_every_n_epochs": 1}])
def test_a_run_resumed_after_any_step_sees_what_the_whole_run_sees(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    whole = fit(data(), callbacks=[Saves(tmp_path)], **options)
    steps = 1 + [sum(map(len, whole[: n + 1])) for n in range(len(whole))].index(60)
    for epoch in (whole[:steps], whole[steps:]):
        assert sorted(i for batch in epoch for i in batch) == list(range(60))
    assert whole[:steps] != whole[steps:]
    for step in (1, steps - 1, steps, steps + 1):
        workers = 2 if step == steps + 1 else 0
        again = data(num_workers=workers)
        assert whole[:step] + fit(again, tmp_path / f"{step}.ckpt", **options) == whole, step


def test_another_budget_is_refused(tmp_path: Path) -> None:
    fit(data(), callbacks=[Saves(tmp_path)])
    with pytest.raises(CheckpointError, match=r"80.*40.*same.*tokens_per_step"):
        fit(data(tokens_per_step=40), tmp_path / "3.ckpt")


def test_a_new_run_starts_afresh_and_limits_end_an_epoch_early() -> None:
    datamodule = data()
    first = fit(datamodule, max_epochs=1, limit_train_batches=3)
    again = fit(datamodule, limit_train_batches=3)
    assert again[:3] == first
    assert again == [batch for epoch in range(2) for batch in fit_whole_epoch(epoch)[:3]]


def test_overfitting_takes_the_same_batches_in_every_epoch() -> None:
    seen = fit(data(), overfit_batches=2)
    assert len(seen) == 4
    assert seen[:2] == seen[2:]


class Estimates(Collects):
    """Asks for the number of steps before a checkpoint is read, as schedulers do."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def test_what_is_planned_and_not_trained_is_counted_in_short_and_in_resumed_epochs(
    tmp_path: Path,
) -> None:
    counts: list[int] = []

    class Counts(Saves):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            super().on_train_batch_end(trainer)
            counts.append(trainer.datamodule.set_slowdowns([1.0]))  # type: ignore[attr-defined]

    options: dict[str, Any] = {"limit_train_batches": 4, "callbacks": [Counts(tmp_path)]}
    whole = fit(data(num_ahead=2), **options)
    assert counts == [2] * len(whole)
    trainer = L.Trainer(**quiet(max_epochs=2, devices=1) | options)
    module = Estimates()
    checkpoint = tmp_path / "3.ckpt"
    again = data(num_ahead=2)
    trainer.fit(module, again, ckpt_path=checkpoint, weights_only=False)
    assert whole[:3] + module.seen == whole
    assert set(counts) == {2}


def fit_whole_epoch(epoch: int) -> list[list[int]]:
    datamodule = data()
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    loader.batch_sampler.set_epoch(epoch)
    return list(loader)


def test_validation_takes_every_sample_once_in_order_each_time() -> None:
    datamodule = data(val_dataset=Rows(LENGTHS))
    module = Validates()
    trainer = L.Trainer(**quiet(max_epochs=2, devices=1, num_sanity_val_steps=2))
    trainer.fit(module, datamodule)
    passes = module.validated[2:]
    half = len(passes) // 2
    assert passes[:half] == passes[half:]
    assert [i for batch in passes[:half] for i in sorted(batch)] == list(range(60))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_planned_ahead_and_fetched_ahead_without_counting(num_workers: int) -> None:
    datamodule = data(num_workers=num_workers, num_ahead=6)
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    batches = iter(loader)
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


def test_several_ranks_without_plans_are_refused() -> None:
    datamodule = data()
    datamodule.setup("fit")
    trainer = SimpleNamespace(strategy=DDPStrategy(), world_size=2, global_rank=0)
    datamodule.trainer = trainer  # type: ignore[assignment]
    datamodule._prepare_models = lambda: None  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="DDPStrategy runs on 2 ranks"):
        datamodule.train_dataloader()


def test_loaders_made_anew_ask_for_plans_under_names_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: list[str] = []
    monkeypatch.setattr(AheadPlanner, "request", lambda self, key, _: names.append(key))
    datamodule = data(val_dataset=Rows(LENGTHS))
    datamodule.setup("fit")
    for make in (datamodule.train_dataloader, datamodule.val_dataloader) * 2:
        assert list(make())
    assert len(set(names)) == len(names) > 30


def test_samples_are_packed_by_default() -> None:
    datamodule = data(collate=None, context_length=16)
    datamodule.setup("fit")
    batches = list(datamodule.train_dataloader())
    assert all(isinstance(batch, PackedBatch) for batch in batches)
    assert sum(batch.num_tokens for batch in batches) == sum(min(n, 16) for n in LENGTHS)
    assert max(batch.max_seqlen for batch in batches) <= 16
    assert datamodule.sample_lengths().sum() == sum(min(n, 16) for n in LENGTHS)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one whole context"):
        data(tokens_per_step=30)
    with pytest.raises(ConfigurationError, match="RowStream is a stream"):
        HeteroDataModule(RowStream(LENGTHS), tokens_per_step=80, context_length=40)
    with pytest.raises(ConfigurationError, match="isn't made yet"):
        data().set_slowdowns([1.0])
    saved = data()
    saved.setup("fit")
    other = data(seed=4)
    other.setup("fit")
    with pytest.raises(CheckpointError, match="seed"):
        other.load_state_dict(saved.state_dict())
