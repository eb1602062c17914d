"""A checkpoint goes on under any plan, ownership and number of ranks, and on one device."""

import json
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest

from lightning_hetero.callbacks import LayerwiseCheckpoint
from lightning_hetero.callbacks.checkpointing import places
from lightning_hetero.checkpoint import LocalStore, claims
from lightning_hetero.checkpoint.claims import OWNER_FILE
from lightning_hetero.core.errors import CheckpointError
from tests.callbacks.layerwise_runs import export, fit, leg, train
from tests.callbacks.servers import S3Server
from tests.fits import assert_same
from tests.plans import ALONE, TURNED, UNEQUAL, Plan, pipeline, plan_of, stage
from tests.processes import ProcessPool

pytestmark = pytest.mark.filterwarnings("ignore")

TENSOR_PARALLEL = plan_of(pipeline(stage([0, 1], 0, 3)), pipeline(stage(2, 0, 3)))


def owned(plan: Plan, *shares: float) -> Plan:
    """Return a plan whose ranks own these shares of masters and optimizer states."""
    return {**plan, "owner_shares": list(shares)}


# Each ownership, redundancy, tensor parallelism, a single device and an idle owner, in turn.
LEGS = [
    leg(2, UNEQUAL, redundancy=1),
    leg(4, TENSOR_PARALLEL, ownership="even"),
    leg(6, TURNED, ownership="parameter", redundancy=1),
    leg(8, ALONE),
    leg(10, TENSOR_PARALLEL, redundancy=1),
    leg(12, owned(UNEQUAL, 0.1, 0.7, 0.2), ownership="memory"),
    leg(13, owned(UNEQUAL, 0.5, 0.0, 0.5), ownership="memory"),
    leg(14, owned(TENSOR_PARALLEL, 0.2, 0.1, 0.7), redundancy=1),
    leg(16, ALONE),
]


@pytest.mark.dist
@pytest.mark.slow
def test_each_leg_of_a_run_may_have_another_plan_and_other_owners(
    pool: ProcessPool, tmp_path: Path
) -> None:
    whole = pool.run_alone(fit, leg(16))
    losses: list[float] = []
    for part in LEGS:
        results = pool.run(fit, part.size, part, tmp_path / "run")
        assert all(found.losses == results[0].losses for found in results)
        if part.ownership == "memory":
            own = np.array([sum(found.own_bytes.values()) for found in results])
            np.testing.assert_allclose(own / own.sum(), part.plan["owner_shares"], atol=0.03)
        losses += results[0].losses
    assert_same(replace(results[0], losses=losses, logged=whole.logged), whole, rtol=1e-4)
    np.testing.assert_allclose(losses, whole.losses, rtol=1e-5)


@pytest.mark.dist
def test_an_exported_checkpoint_of_slices_goes_on_in_plain_lightning(
    pool: ProcessPool, tmp_path: Path
) -> None:
    begun = pool.run(fit, 3, leg(6, UNEQUAL), tmp_path / "run")[0].losses
    export(tmp_path / "run", tmp_path / "whole.ckpt")
    gone_on = pool.run_alone(fit, leg(10, ckpt_path=tmp_path / "whole.ckpt")).losses
    whole = pool.run_alone(fit, leg(10))
    np.testing.assert_allclose(begun + gone_on, whole.losses, rtol=1e-5)


@pytest.mark.parametrize("num_steps", [3, 4])
def test_random_numbers_go_on_where_they_were(tmp_path: Path, num_steps: int) -> None:
    begun = train(tmp_path / "run", num_steps)
    assert begun + train(tmp_path / "run", 6) == train(tmp_path / "whole", 6)


class Fails(L.Callback):
    """Ends training by an error before some step; notes the epoch of each step until then."""

    def __init__(self, *, at: int | None = None) -> None:
        self.at = at
        """None fails one step after a checkpoint has been uploaded."""
        self.epochs: list[int] = []
        self.steps = 0

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        (checkpoint,) = (c for c in trainer.callbacks if isinstance(c, LayerwiseCheckpoint))
        saved, self.steps = checkpoint.saved, trainer.global_step
        if self.steps == self.at or (self.at is None and saved is not None):
            # A process that has failed writes no more; this one lives on.
            if self.at is None:
                saved.wait_until_uploaded(60)
            checkpoint._writer.close()
            raise RuntimeError("on purpose")
        self.epochs.append(trainer.fit_loop.epoch_progress.current.processed)


def test_epochs_are_counted_on_however_often_a_run_resumes_where_one_ends(tmp_path: Path) -> None:
    fails = Fails()
    for fails.at in (2, 4, 7, 8):
        with pytest.raises(RuntimeError, match="on purpose"):
            train(tmp_path, 12, fails, every_n_train_steps=1)
    assert fails.epochs == [step // 2 for step in range(8)]


class Stops(L.Callback):
    """Ends training as EarlyStopping does."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop = True


def test_the_last_step_of_a_run_that_stops_early_is_saved(tmp_path: Path) -> None:
    assert len(train(tmp_path, 12, Stops(), every_n_train_steps=100)) == 2
    assert train(tmp_path, 2) == []


def checkpoint_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("checkpoint-")}


def test_a_failed_run_goes_on_from_memory_unless_its_folder_was_deleted_and_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(places, "SHARED_MEMORY", tmp_path / "shm")
    fails, before = Fails(), checkpoint_threads()
    for steps in (2, 4, 2):
        with pytest.raises(RuntimeError, match="on purpose"):
            train(tmp_path / "run", 8, fails, shared_memory=True)
        assert fails.steps == steps
        if steps == 4:
            shutil.rmtree(tmp_path / "run")
    end_s = time.monotonic() + 60
    while left := checkpoint_threads() - before:
        assert time.monotonic() < end_s, left
        time.sleep(0.01)


def test_memory_is_freed_only_once_another_place_has_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(places, "SHARED_MEMORY", tmp_path / "shm")
    options = {"shared_memory": True, "in_epochs": True}
    write = LocalStore.write

    def full(self: LocalStore, name: str, chunks: Any) -> None:
        if str(self).endswith("/run") and name.endswith(".safetensors"):
            raise OSError(28, "No space left on device")
        write(self, name, chunks)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "write", full)
        with pytest.raises(CheckpointError, match=r"No lasting place.*No space left"):
            train(tmp_path / "run", 4, **options)
    assert list((tmp_path / "shm").rglob("*.safetensors"))
    # Nothing is left to train; the end of the run lies in memory alone, and stays there.
    assert train(tmp_path / "run", 4, **options) == []
    assert list((tmp_path / "shm").rglob("*.safetensors"))
    assert len(train(tmp_path / "run", 6, **options)) == 2
    assert not list((tmp_path / "shm").rglob("*.safetensors"))


class Pauses(L.Callback):
    """An S3 server answers nothing from a step on, until the last one is trained."""

    def __init__(self, server: S3Server) -> None:
        self._server = server

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            self._server.send_signal(signal.SIGSTOP)
        if trainer.global_step == trainer.max_steps:
            self._server.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_an_s3_store_that_answers_nothing_stops_no_step_and_has_the_last_one_in_the_end(
    tmp_path: Path,
) -> None:
    with S3Server() as server:
        options = {"storage_options": S3Server.options(server.port)}
        own = {"local_dir": tmp_path / "disk", **options}
        assert len(train("s3://bucket/run", 12, Pauses(server), **own)) == 12
        # All that was on the node is lost.
        assert len(train("s3://bucket/run", 14, **options)) == 2


def test_a_second_living_job_in_a_folder_is_refused_until_the_first_has_ended(
    tmp_path: Path,
) -> None:
    lease = claims.Lease(LocalStore(tmp_path), shared=False)
    lease.take()
    owner = json.loads((tmp_path / OWNER_FILE).read_text())
    # As if another process had taken it: the test runner, which lives.
    owner |= {"process": claims._process(os.getppid()), "membership": None}
    (tmp_path / OWNER_FILE).write_text(json.dumps(owner))
    with pytest.raises(CheckpointError, match="Another job writes its checkpoints"):
        train(None, 4, local_dir=tmp_path)
    lease.release()
    assert train(None, 4, local_dir=tmp_path)
    assert not (tmp_path / OWNER_FILE).exists()
