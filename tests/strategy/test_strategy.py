"""Features of the Trainer under HeteroStrategy do what they do on a single device."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, WeightAveraging
from torch import Tensor
from torch.optim.swa_utils import get_ema_avg_fn
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_hetero import HeteroStrategy, ParallelPlan
from tests.fits import Case, Outcome, assert_same, assert_same_weights, outcome_of, train
from tests.plans import ALONE, TRIPLE, TURNED, UNEQUAL
from tests.processes import ProcessPool
from tests.runtime.case_modules import RowsModule
from tests.toy import TokenRows, ToyModule, ToyOptions, loader, quiet

pytestmark = pytest.mark.dist


def use_every_entry_point(rank: int, case: Case) -> tuple[list[Outcome], list[Any], list[Any]]:
    """Fit, validate, test and predict with one Trainer, then fit again with another."""
    module = train(case)
    outcomes, trainer = [outcome_of(module)], module.trainer
    first, second = (loader(10, case.batch_size or 0, seed=seed) for seed in (1, 2))
    told = [*trainer.validate(module, first, verbose=False)]
    told += trainer.test(module, second, verbose=False)
    predictions = [
        item if item is None else item.numpy() for item in trainer.predict(module, second)
    ]
    outcomes.append(outcome_of(train(replace(case, max_epochs=1), module=module)))
    return outcomes, told, predictions


def test_every_entry_point_gives_what_a_single_device_gives(pool: ProcessPool) -> None:
    """And predictions of a pipeline are complete on each of its ranks."""
    sanity = {"num_sanity_val_steps": 2}
    how: dict[str, Any] = {"options": {"num_stages": 2}, "max_epochs": 2, "trainer": sanity}
    case = Case(model="validated", world_size=4, **how)
    (expected, told, predicted), results = (
        pool.run(use_every_entry_point, 1, case.on_single_device())[0],
        pool.run(use_every_entry_point, 4, case),
    )
    for outcomes, rank_told, _ in results:
        for one, other in zip(outcomes, expected, strict=True):
            assert_same(one, other)
        for one, other in zip(rank_told, told, strict=True):
            assert one == pytest.approx(other, rel=1e-5)
    pipelines = [[item for *_, item in ranks] for ranks in (results[:2], results[2:])]
    for ranks in pipelines:
        for one, other in zip(*ranks, strict=True):
            assert np.array_equal(one, other)
    batches = zip(*(ranks[0] for ranks in pipelines), strict=True)
    parts = [part for batch in batches for part in batch if part is not None]
    assert np.array_equal(np.concatenate(parts), np.concatenate(predicted))


class WorseningModule(ToyModule):
    """Its validation gets worse after three epochs."""

    validates = 1

    def __init__(self) -> None:
        super().__init__(ToyOptions())

    def rows(self, num_empty: int) -> Any:
        return TokenRows(8)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss * 0 + abs(self.current_epoch - 2))


def stop_early(rank: int, folder: str) -> tuple[Any, ...]:
    stopping = EarlyStopping("val_loss", patience=2)
    best = ModelCheckpoint(folder, monitor="val_loss", filename="{epoch}", save_top_k=1)
    trainer = train(
        Case(model=WorseningModule, plan=UNEQUAL, max_epochs=20), stopping, best
    ).trainer
    epochs, stopped = trainer.current_epoch, stopping.stopped_epoch
    trainer.test(ckpt_path="best", dataloaders=loader(4, 2, seed=2), verbose=False)
    tested = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return epochs, stopped, Path(best.best_model_path).name, float(best.best_model_score), tested


def test_callbacks_that_watch_a_metric_decide_alike_on_all_ranks(
    pool: ProcessPool, tmp_path: Path
) -> None:
    results = pool.run(stop_early, 3, str(tmp_path))
    assert all(result == results[0] for result in results)
    assert results[0][1:4] == (4, "epoch=2.ckpt", 0.0)
    assert (tmp_path / "epoch=2.ckpt").is_file()


class SaveAt(L.Callback):
    """Saves checkpoints when so many steps are done, behind the epoch if they end one."""

    def __init__(self, paths: Mapping[int, Path]) -> None:
        self.paths = paths

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step in self.paths and not trainer.is_last_batch:
            trainer.save_checkpoint(self.paths[trainer.global_step])

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step in self.paths:
            trainer.save_checkpoint(self.paths[trainer.global_step])


class Resumable(RowsModule):
    """Its loader goes on inside an epoch; it knows its learning rate in the end."""

    validates = 1

    def __init__(self, case: Case, **order: Any) -> None:
        super().__init__(case)
        self.loader = functools.partial(StatefulDataLoader, **order)  # type: ignore[assignment]

    def on_train_end(self) -> None:
        self.seen = [group["lr"] for group in self.trainer.optimizers[0].param_groups]


def fit(
    rank: int,
    case: Case,
    saves: Mapping[int, Path] | None = None,
    *,
    averages: bool = False,
    **order: Any,
) -> Outcome:
    """Train two epochs, and save at some steps if asked."""
    callbacks: list[L.Callback] = [WeightAveraging(avg_fn=get_ema_avg_fn(0.5))] if averages else []
    case = replace(case, model=functools.partial(Resumable, case, **order))
    return outcome_of(train(case, *callbacks, SaveAt(saves or {})))


def case_of(plan: Any, optimizer: str = "adamw", **more: Any) -> Case:
    """Return two epochs of four steps of six rows."""
    size = 6 // (1 if plan is None else len(plan["pipelines"]))
    how = {"optimizer": optimizer, "tied": optimizer == "sgd", "batch_size": size, **more}
    return Case(plan=plan, num_rows=24, max_epochs=2, **how)


def assert_continued(found: Outcome, whole: Outcome, save_at: int) -> None:
    # An epoch's mean begins anew with a run.
    logged = whole.logged | {"val_loss": found.logged["val_loss"]}
    losses = whole.losses[:save_at] + found.losses
    assert_same(replace(found, losses=losses, logged=logged), whole)


@dataclass(frozen=True)
class Saved:
    """A run that has never stopped, and its checkpoints by step."""

    whole: Outcome
    paths: dict[int, Path]


SAVES = (2, 4, 6)
"""Inside an epoch, at its end, and inside the last."""


@pytest.fixture(scope="module")
def saved(pool: ProcessPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Saved]:
    """Return a run of two epochs with its checkpoints, trained once: under a plan, or alone."""

    @functools.cache
    def train_once(optimizer: str, *, alone: bool = False) -> Saved:
        folder = tmp_path_factory.mktemp("saved")
        paths = {step: folder / f"{step}.ckpt" for step in SAVES}
        case = case_of(None if alone else UNEQUAL, optimizer)
        whole = pool.run(fit, case.size, case, paths)[0]
        assert len(whole.losses) == 8
        return Saved(whole, paths)

    return train_once


RESUMED = {"copies": TRIPLE, "stages": TURNED, "one rank": ALONE, "plain": None}


@pytest.mark.parametrize(
    ("optimizer", "save_at", "under"),
    [
        ("adamw", 2, ["copies"]),
        ("adamw", 4, ["stages", "plain"]),
        ("sgd", 6, ["one rank", "plain"]),
    ],
)
def test_a_run_resumes_under_another_plan_as_if_it_had_never_stopped(
    pool: ProcessPool, saved: Any, optimizer: str, save_at: int, under: list[str]
) -> None:
    first = saved(optimizer)
    for name in under:
        case = case_of(RESUMED[name], optimizer, ckpt_path=first.paths[save_at])
        for found in pool.run(fit, case.size, case):
            assert_continued(found, first.whole, save_at)


def test_a_checkpoint_of_a_single_device_resumes_under_a_plan(
    pool: ProcessPool, saved: Any
) -> None:
    first = saved("adamw", alone=True)
    for found in pool.run(fit, 3, case_of(UNEQUAL, ckpt_path=first.paths[4])):
        assert_continued(found, first.whole, 4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_shuffled_run_resumes_inside_an_epoch_in_the_same_order(
    tmp_path: Path, num_workers: int
) -> None:
    # In this very process, since those of the pool may not start workers.
    paths = {save_at: tmp_path / f"{save_at}.ckpt" for save_at in (2, 6)}
    order: dict[str, Any] = {"shuffle": True, "num_workers": num_workers}
    try:
        whole = fit(0, case_of(ALONE), paths, **order)
        for save_at, path in paths.items():
            dist.destroy_process_group()
            found = fit(0, case_of(ALONE, ckpt_path=path), **order)
            np.testing.assert_allclose(found.losses, whole.losses[save_at:], rtol=1e-5)
    finally:
        dist.destroy_process_group()


class DrawsUncounted(ToyModule):
    """Its steps draw random numbers, and take no `batch_idx`."""

    def __init__(self) -> None:
        super().__init__(ToyOptions())
        self.drawn: dict[str, list[float]] = {"train": [], "validate": []}

    def training_step(self, batch: Any) -> Tensor:
        self.drawn["train"].append(float(torch.rand(())))
        return self.loss(batch)

    def validation_step(self, batch: Any) -> None:
        self.drawn["validate"].append(float(torch.rand(())))


@pytest.mark.filterwarnings("ignore")
def test_steps_that_take_no_number_of_their_batch_draw_other_numbers_in_each() -> None:
    drawn = []
    for module in (DrawsUncounted(), DrawsUncounted()):
        L.seed_everything(3, verbose=False)
        strategy = HeteroStrategy(ParallelPlan.from_dict(ALONE))
        options = quiet(max_epochs=2, num_sanity_val_steps=0)
        trainer = L.Trainer(**options, strategy=strategy, devices=1)
        trainer.fit(module, loader(12, 4), loader(8, 4))
        drawn.append(module.drawn)
    assert drawn[0] == drawn[1]
    assert {key: len(set(numbers)) for key, numbers in drawn[0].items()} == {
        "train": 6,
        "validate": 4,
    }


def test_a_module_that_is_built_empty_is_on_the_meta_device() -> None:
    trainer = L.Trainer(**quiet(), strategy=HeteroStrategy(), devices=1)
    with trainer.init_module(empty_init=True):
        empty = torch.nn.Linear(2, 2)
    with trainer.init_module():
        full = torch.nn.Linear(2, 2)
    assert empty.weight.is_meta
    assert not full.weight.is_meta


def read_with_plain_lightning(rank: int, path: Path) -> tuple[Any, dict[str, Any]]:
    """Return the weights; then the keys of a checkpoint and the shapes of moments."""
    module = ToyModule.load_from_checkpoint(path, options=ToyOptions())
    content = torch.load(path, weights_only=True)
    state = content["optimizer_states"][0]["state"]
    shapes = {index: tuple(item["exp_avg"].shape) for index, item in state.items()}
    weights = {name: item.numpy().copy() for name, item in module.state_dict().items()}
    return weights, {"shapes": shapes, "keys": sorted(content)}


def test_a_checkpoint_is_what_plain_lightning_writes(pool: ProcessPool, saved: Any) -> None:
    paths = saved("adamw").paths[4], saved("adamw", alone=True).paths[4]
    found, expected = (pool.run(read_with_plain_lightning, 1, path)[0] for path in paths)
    assert found[1] == expected[1]
    assert_same_weights(found[0], expected[0])


def test_averaged_weights_are_validated_and_kept(pool: ProcessPool, tmp_path: Path) -> None:
    average = functools.partial(fit, averages=True)
    paths = [tmp_path / name for name in ("plan.ckpt", "single.ckpt")]
    expected = pool.run(average, 1, case_of(None), {3: paths[1]})[0]
    for found in pool.run(average, 3, case_of(UNEQUAL), {3: paths[0]}):
        assert_same(found, expected)
    (weights, _), (whole, _) = (pool.run(read_with_plain_lightning, 1, path)[0] for path in paths)
    assert_same_weights(weights, whole)
    for found in pool.run(average, 2, case_of(TURNED, ckpt_path=paths[0])):
        assert_continued(found, expected, 3)
