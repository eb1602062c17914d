"""Features of the Trainer under HeteroStrategy do what they do on a single device."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero import HeteroStrategy, ParallelPlan
from tests.plans import ALONE, UNEQUAL, pipeline, plan_of, stage
from tests.processes import ProcessPool
from tests.strategy.features import (
    average_weights,
    fit_single,
    fit_with_defaults,
    read_with_plain_lightning,
    stop_early,
    train_and_save,
)
from tests.toy import ToyModule, ToyOptions, loader, quiet

pytestmark = pytest.mark.dist

TOLERANCE = 1e-5

THREE = plan_of(*(pipeline(stage(rank, 0, 3)) for rank in range(3)))
TWO_STAGES = plan_of(pipeline(stage(1, 0, 2), stage(0, 2, 3)))


def assert_close(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_close(found[key], value, f"{where}.{key}")
        return
    if isinstance(expected, list) and expected and isinstance(expected[0], dict):
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_close(one, other, f"{where}[{index}]")
        return
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * scale, err_msg=where)


COMPARED = ["losses", "fitted", "weights", "validated", "tested", "weights_again"]


def test_every_entry_point_gives_what_a_single_device_gives(pool: ProcessPool) -> None:
    """And predictions of a pipeline are complete on each of its ranks."""
    expected, results = pool.run(fit_single, 1, 4)[0], pool.run(fit_with_defaults, 4, 2, 4)
    for result in results:
        for key in COMPARED:
            assert_close(result[key], expected[key], key)
    pipelines = [results[:2], results[2:]]
    for ranks in pipelines:
        for one, other in zip(ranks[0]["predictions"], ranks[1]["predictions"], strict=True):
            assert np.array_equal(one, other)
    parts = [
        part
        for batches in zip(*(ranks[0]["predictions"] for ranks in pipelines), strict=True)
        for part in batches
        if part is not None
    ]
    assert np.array_equal(np.concatenate(parts), np.concatenate(expected["predictions"]))


def test_callbacks_that_watch_a_metric_decide_alike_on_all_ranks(
    pool: ProcessPool, tmp_path: Path
) -> None:
    results = pool.run(stop_early, 3, UNEQUAL, 3, str(tmp_path))
    assert all(result == results[0] for result in results)
    assert results[0]["best"] == "epoch=2.ckpt"
    assert results[0]["score"] == 0.0
    assert results[0]["stopped"] == 4
    assert (tmp_path / "epoch=2.ckpt").is_file()


def assert_continued(result: dict[str, Any], whole: dict[str, Any], save_at: int) -> None:
    assert_close(result["losses"], whole["losses"][save_at:], "losses")
    for key in ("weights", "rate", "global_step"):
        assert_close(result[key], whole[key], key)
    assert_close(result["metrics"]["val_loss"], whole["metrics"]["val_loss"])


def run(pool: ProcessPool, world_size: int, *arguments: Any, **options: Any) -> list[Any]:
    return pool.run(functools.partial(train_and_save, **options), world_size, *arguments)


@dataclass(frozen=True)
class Saved:
    """A run that has never stopped, and its checkpoints by step."""

    whole: dict[str, Any]
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
        arguments = (1, None, 1, 6) if alone else (3, UNEQUAL, 3, 3)
        options = toy_of(optimizer)
        whole = run(pool, *arguments, saves=paths, options=options)[0]
        assert len(whole["losses"]) == 8
        return Saved(whole, paths)

    return train_once


def toy_of(optimizer: str) -> ToyOptions:
    return ToyOptions(optimizer=optimizer, tied=optimizer == "sgd")


RESUMED = {"copies": (THREE, 3, 2), "stages": (TWO_STAGES, 2, 6), "one rank": (ALONE, 1, 6)}
RESUMED["plain"] = (None, 1, 6)


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
    for plan, world_size, batch_size in (RESUMED[name] for name in under):
        resume = {"resume": first.paths[save_at], "options": toy_of(optimizer)}
        for result in run(pool, world_size, plan, world_size, batch_size, **resume):
            assert_continued(result, first.whole, save_at)


def test_a_checkpoint_of_a_single_device_resumes_under_a_plan(
    pool: ProcessPool, saved: Any
) -> None:
    first = saved("adamw", alone=True)
    for result in run(pool, 3, UNEQUAL, 3, 3, resume=first.paths[4]):
        assert_continued(result, first.whole, 4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_shuffled_run_resumes_inside_an_epoch_in_the_same_order(
    tmp_path: Path, num_workers: int
) -> None:
    # In this very process, since those of the pool may not start workers.
    paths = {save_at: tmp_path / f"{save_at}.ckpt" for save_at in (2, 6)}
    order: dict[str, Any] = {"shuffle": True, "num_workers": num_workers}
    try:
        whole = train_and_save(0, ALONE, 1, 6, saves=paths, **order)
        for save_at, path in paths.items():
            dist.destroy_process_group()
            resumed = train_and_save(0, ALONE, 1, 6, resume=path, **order)
            assert_close(resumed["losses"], whole["losses"][save_at:], "losses")
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


def test_a_checkpoint_is_what_plain_lightning_writes(pool: ProcessPool, saved: Any) -> None:
    paths = saved("adamw").paths[4], saved("adamw", alone=True).paths[4]
    found, expected = (pool.run(read_with_plain_lightning, 1, path)[0] for path in paths)
    assert found["keys"] == expected["keys"]
    assert found["shapes"] == expected["shapes"]
    assert_close(found["weights"], expected["weights"])


def test_averaged_weights_are_validated_and_kept(pool: ProcessPool, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("plan.ckpt", "single.ckpt")]
    expected = pool.run(average_weights, 1, None, 1, 6, paths[1])[0]
    for result in pool.run(average_weights, 3, UNEQUAL, 3, 3, paths[0]):
        for key in expected:
            assert_close(result[key], expected[key], key)
    found, saved = (pool.run(read_with_plain_lightning, 1, path)[0] for path in paths)
    assert_close(found["weights"], saved["weights"])
    for result in pool.run(average_weights, 2, TWO_STAGES, 2, 6, paths[0], paths[0]):
        assert_close(result["losses"], expected["losses"][3:], "losses")
        assert_close(result["weights"], expected["weights"], "weights")
