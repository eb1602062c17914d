"""A run that recovers what is corrupt, with checksums that are right, takes another copy."""

import math
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.callbacks import LayerwiseCheckpoint
from lightning_hetero.checkpoint.probation import Probation
from lightning_hetero.core.errors import CheckpointError, HeteroError
from tests.processes import ProcessPool
from tests.toy import TokenRows, ToyModule, ToyOptions, quiet

pytestmark = pytest.mark.filterwarnings("ignore")

STRATEGIES = pytest.mark.parametrize("is_hetero", [False, True])


class Spoiled(ToyModule):
    """Has a loss that is no number where the samples that are named take part."""

    bad_samples: tuple[int, ...] = ()

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        rows = TokenRows(40).ids
        is_bad = any(bool((rows[i] == batch[0]).all(-1).any()) for i in self.bad_samples)
        return loss * math.nan if is_bad else loss


class Corrupts(L.Callback):
    """Spoils the weights before a step is saved, as faulty memory does: checksums are right."""

    def __init__(self, step: int, factor: float) -> None:
        self.step, self.factor = step, factor

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step:
            for optimizer in trainer.optimizers:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.data.mul_(self.factor)


def train(
    folder: Path,
    num_steps: int,
    *callbacks: L.Callback,
    is_hetero: bool,
    bad_samples: tuple[int, ...] = (),
    world_size: int = 1,
) -> list[float]:
    torch.manual_seed(0)
    checkpoint = LayerwiseCheckpoint(folder, every_n_train_steps=2, shared_memory=False, keep=3)
    module = Spoiled(ToyOptions(optimizer="sgd"))
    module.bad_samples = bad_samples
    options = {**quiet(max_steps=num_steps, devices=world_size), "enable_checkpointing": True}
    if is_hetero:
        plan = ParallelPlan.even(world_size=world_size, num_layers=3)
        options["strategy"] = HeteroStrategy(plan=plan, num_microbatches=1)
    trainer = L.Trainer(**options, callbacks=[*callbacks, checkpoint])
    trainer.fit(module, StatefulDataLoader(TokenRows(40), batch_size=4 // world_size))
    return module.losses


@STRATEGIES
@pytest.mark.parametrize("factor", [3e2, math.nan])
def test_a_corrupt_checkpoint_is_put_aside_and_the_next_older_one_taken(
    tmp_path: Path, *, is_hetero: bool, factor: float
) -> None:
    whole = train(tmp_path / "whole", 8, is_hetero=is_hetero)
    run = tmp_path / "run"
    if math.isnan(factor):
        # A state that is no number is never saved, so the run goes on from the one before.
        with pytest.raises(CheckpointError, match="isn't finite"):
            train(run, 6, Corrupts(6, factor), is_hetero=is_hetero)
    else:
        train(run, 6, Corrupts(6, factor), is_hetero=is_hetero)
        with pytest.raises(CheckpointError, match=r"can't be trusted: step 6.*gradient norm"):
            train(run, 8, is_hetero=is_hetero)
    np.testing.assert_allclose(train(run, 8, is_hetero=is_hetero), whole[4:], rtol=1e-5)
    assert train(run, 8, is_hetero=is_hetero) == []


@STRATEGIES
def test_a_step_that_fails_from_three_copies_ends_the_run_and_names_its_samples(
    tmp_path: Path, *, is_hetero: bool
) -> None:
    whole = train(tmp_path / "whole", 8, is_hetero=is_hetero)
    run = tmp_path / "run"
    train(run, 6, is_hetero=is_hetero)
    texts = []
    for _ in range(3):
        with pytest.raises(HeteroError) as caught:
            train(run, 8, is_hetero=is_hetero, bad_samples=(25,))
        texts.append("\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())]))
    assert "step 6 from remote" in texts[0]
    assert ["data is at fault" in text for text in texts] == [False, False, True]
    assert "Step 7 has failed from 3 copies" in texts[2]
    assert "step 6 from remote" in texts[2]
    assert "batch 6 of epoch 0" in texts[2]
    # Nothing is lost for it: with other samples the run goes on, also from what had been put aside.
    gone_on = train(run, 8, is_hetero=is_hetero)
    np.testing.assert_allclose(gone_on, whole[-len(gone_on) :], rtol=1e-5)
    assert not list(run.glob("*/quarantined"))


@STRATEGIES
def test_the_last_copy_there_is_is_never_put_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_hetero: bool
) -> None:
    train(tmp_path, 2, is_hetero=is_hetero)
    for _ in range(2):
        with pytest.raises(HeteroError) as caught:
            train(tmp_path, 6, is_hetero=is_hetero, bad_samples=(13,))
        notes = [str(caught.value), *getattr(caught.value, "__notes__", ())]
        assert "There is no other copy to go on from" in "".join(notes)
    # Nor is it a reason to stop that a step is odd.
    monkeypatch.setattr(Probation, "doubt", lambda self, facts: f"step {facts.step} is odd")
    assert len(train(tmp_path, 4, is_hetero=is_hetero)) == 2


def train_two(rank: int, folder: Path, num_steps: int, factor: float) -> list[float] | str:
    """Return the losses of a run of two ranks, or what it ended with."""
    try:
        spoil = Corrupts(6, factor if rank == 1 else 1.0)
        return train(folder, num_steps, spoil, is_hetero=True, world_size=2)
    except HeteroError as error:
        return str(error)


@pytest.mark.dist
def test_what_is_corrupt_on_one_rank_is_put_aside_by_all(pool: ProcessPool, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 8, is_hetero=False)
    run = tmp_path / "run"
    pool.run(train_two, 2, run, 6, 3e2)
    for text in pool.run(train_two, 2, run, 8, 1.0):
        assert "can't be trusted: step 6 from remote" in str(text)
    for losses in pool.run(train_two, 2, run, 8, 1.0):
        np.testing.assert_allclose(losses, whole[4:], rtol=1e-5)
