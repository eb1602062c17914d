"""A checkpoint goes on under any plan, ownership and number of ranks, and on a single device."""

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_hetero.callbacks import LayerwiseCheckpoint
from lightning_hetero.callbacks.checkpointing import places
from lightning_hetero.checkpoint import FsspecStore, LocalStore, claims
from lightning_hetero.checkpoint.claims import OWNER_FILE
from lightning_hetero.core.errors import CheckpointError
from tests.callbacks.layerwise_runs import Leg, export, fit, train
from tests.callbacks.servers import S3Server
from tests.processes import ProcessPool
from tests.toy import TokenRows, ToyModule, ToyOptions, quiet

pytestmark = pytest.mark.filterwarnings("ignore")

ASYMMETRIC = {
    "pipelines": [
        {"stages": [{"ranks": [0], "layers": [0, 3]}]},
        {"stages": [{"ranks": [1], "layers": [0, 1]}, {"ranks": [2], "layers": [1, 3]}]},
    ]
}
TENSOR_PARALLEL = {
    "pipelines": [
        {"stages": [{"ranks": [0, 1], "layers": [0, 3]}]},
        {"stages": [{"ranks": [2], "layers": [0, 3]}]},
    ]
}
TWO_STAGES = {
    "pipelines": [{"stages": [{"ranks": [1], "layers": [0, 2]}, {"ranks": [0], "layers": [2, 3]}]}]
}
ALONE = {"pipelines": [{"stages": [{"ranks": [0], "layers": [0, 3]}]}]}


def owned(plan: dict[str, Any], *shares: float) -> dict[str, Any]:
    """Return a plan whose ranks own these shares of masters and optimizer states."""
    return {**plan, "owner_shares": list(shares)}


LEGS = [
    Leg(until=2, plan=ASYMMETRIC, world_size=3, redundancy=1),
    Leg(until=4, plan=TENSOR_PARALLEL, world_size=3, ownership="even"),
    Leg(until=6, plan=TWO_STAGES, world_size=2, ownership="parameter", redundancy=1),
    Leg(until=8),
    Leg(until=10, plan=TENSOR_PARALLEL, world_size=3, redundancy=1),
    Leg(until=12, plan=owned(ASYMMETRIC, 0.1, 0.7, 0.2), world_size=3, ownership="memory"),
    Leg(until=13, plan=owned(ASYMMETRIC, 0.5, 0.0, 0.5), world_size=3, ownership="memory"),
    Leg(until=14, plan=owned(TENSOR_PARALLEL, 0.2, 0.1, 0.7), world_size=3, redundancy=1),
    Leg(until=16, plan=ALONE),
]


@pytest.mark.dist
@pytest.mark.slow
def test_each_leg_of_a_run_may_have_another_plan_and_other_owners(
    pool: ProcessPool, tmp_path: Path
) -> None:
    whole = fit(0, Leg(until=16))
    losses: list[float] = []
    for leg in LEGS:
        results = pool.run(fit, leg.world_size, leg, str(tmp_path / "run"))
        for result in results:
            assert result["losses"] == results[0]["losses"]
        if leg.ownership == "memory":
            owned = np.array([result["num_owned"] for result in results])
            np.testing.assert_allclose(
                owned / whole["num_owned"], leg.plan["owner_shares"], atol=0.03
            )
        losses += results[0]["losses"]
    np.testing.assert_allclose(losses, whole["losses"], rtol=1e-5)
    assert (results[0]["num_steps"], results[0]["lr"]) == (16, whole["lr"])
    for name, averaged in whole["weights"].items():
        np.testing.assert_allclose(results[0]["weights"][name], averaged, rtol=1e-4, atol=1e-6)


@pytest.mark.dist
def test_an_exported_checkpoint_of_slices_goes_on_in_plain_lightning(
    pool: ProcessPool, tmp_path: Path
) -> None:
    leg = Leg(until=6, plan=ASYMMETRIC, world_size=3)
    begun = pool.run(fit, 3, leg, str(tmp_path / "run"))[0]["losses"]
    export(tmp_path / "run", tmp_path / "whole.ckpt")
    gone_on = fit(0, Leg(until=10), None, str(tmp_path / "whole.ckpt"))["losses"]
    np.testing.assert_allclose(begun + gone_on, fit(0, Leg(until=10))["losses"], rtol=1e-5)


@pytest.mark.parametrize("num_steps", [2, 3, 4])
def test_random_numbers_go_on_where_they_were(tmp_path: Path, num_steps: int) -> None:
    begun = train(tmp_path / "run", num_steps)
    assert begun + train(tmp_path / "run", 6) == train(tmp_path / "whole", 6)


class Epochs(L.Callback):
    """Notes which epoch samplers are told in each step; fails before one."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self.fails_at = 0

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.fails_at:
            (checkpoint,) = (c for c in trainer.callbacks if isinstance(c, LayerwiseCheckpoint))
            checkpoint._access.close()
            raise RuntimeError("on purpose")
        self.found.append(trainer.fit_loop.epoch_progress.current.processed)


def test_epochs_are_counted_on_however_often_a_run_resumes_where_one_ends(tmp_path: Path) -> None:
    epochs = Epochs()
    for epochs.fails_at in (2, 4, 7, 8):
        with pytest.raises(RuntimeError, match="on purpose"):
            train(tmp_path, 12, epochs, every_n_train_steps=1)
    assert epochs.found == [step // 2 for step in range(8)]


class Stops(L.Callback):
    """Ends training as EarlyStopping does."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop = True


def test_the_last_step_of_a_run_that_stops_early_is_saved(tmp_path: Path) -> None:
    assert len(train(tmp_path, 12, Stops(), every_n_train_steps=100)) == 2
    assert train(tmp_path, 2) == []


class Fails(L.Callback):
    """Ends training by an error, which leaves what is in shared memory."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        (checkpoint,) = (c for c in trainer.callbacks if isinstance(c, LayerwiseCheckpoint))
        if checkpoint.saved is not None:
            checkpoint.saved.wait_until_uploaded(60)
            # A process that has failed writes no more; this one lives on.
            checkpoint._access.close()
            self.steps = trainer.global_step
            raise RuntimeError("on purpose")


def test_a_failed_run_goes_on_from_memory_unless_its_folder_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(places, "SHARED_MEMORY", tmp_path / "shm")
    fails = Fails()
    for steps in (2, 4, 2):
        with pytest.raises(RuntimeError, match="on purpose"):
            train(tmp_path / "run", 8, fails, shared_memory=True)
        assert fails.steps == steps
        if steps == 4:
            shutil.rmtree(tmp_path / "run")


@pytest.mark.parametrize("limit", ["steps", "epochs"])
def test_memory_is_freed_only_once_another_place_has_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(places, "SHARED_MEMORY", tmp_path / "shm")
    options = {"shared_memory": True, "in_epochs": limit == "epochs"}
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


def test_a_remote_that_cannot_be_listed_never_starts_training_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{tmp_path.name}"
    train(url, 2)

    def down(self: FsspecStore) -> dict[str, int]:
        raise ConnectionError("answered 500")

    with monkeypatch.context() as patch:
        patch.setattr(FsspecStore, "list", down)
        for more, told in (
            ({}, r"3 attempts.*500.*skip_unreadable=True"),
            ({"skip_unreadable": True}, "Nothing to go on from is left"),
        ):
            with pytest.raises(CheckpointError, match=told):
                train(url, 4, **more)
    assert len(train(url, 4)) == 2


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


def test_a_relative_folder_is_where_training_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wanders(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            (tmp_path / f"at-{trainer.global_step}").mkdir()
            os.chdir(tmp_path / f"at-{trainer.global_step}")

    monkeypatch.chdir(tmp_path)
    train("run", 3, Wanders(), every_n_train_steps=1)
    assert len(list((tmp_path / "run").glob("step-*"))) == 2
    assert not list(tmp_path.glob("at-*/*"))


def test_a_second_living_job_in_a_folder_is_refused_until_the_first_has_ended(
    tmp_path: Path,
) -> None:
    lease = claims.Lease(LocalStore(tmp_path), shared=False)
    lease.take()
    owner = json.loads((tmp_path / OWNER_FILE).read_text())
    # As if another process had taken it: the test runner, which lives.
    owner["process"] = claims._process(os.getppid())
    (tmp_path / OWNER_FILE).write_text(json.dumps(owner))
    with pytest.raises(CheckpointError, match="Another job writes its checkpoints"):
        train(None, 4, local_dir=tmp_path)
    lease.release()
    assert train(None, 4, local_dir=tmp_path)
    assert not (tmp_path / OWNER_FILE).exists()


class Ends(L.Callback):
    """Ends a run as a crash does, once the checkpoint of a step is safe; notes its steps."""

    def __init__(self, checkpoint: LayerwiseCheckpoint, until: int) -> None:
        self.checkpoint, self.until = checkpoint, until
        self.steps: dict[int, tuple[int, float]] = {}

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.until:
            assert self.checkpoint.saved is not None
            self.checkpoint.saved.wait_until_confirmed(60)
            raise KeyError("a crash")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.steps[trainer.global_step] = (trainer.current_epoch, float(outputs["loss"]))


class Breaks(L.Callback):
    """Ends training by an error once a checkpoint has been started."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            raise RuntimeError("on purpose")


def checkpoint_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("checkpoint-")}


def test_a_failed_fit_leaves_no_thread(tmp_path: Path) -> None:
    before = checkpoint_threads()
    with pytest.raises(RuntimeError, match="on purpose"):
        train(tmp_path / "run", 8, Breaks())
    end_s = time.monotonic() + 60
    while left := checkpoint_threads() - before:
        assert time.monotonic() < end_s, left
        time.sleep(0.01)


@pytest.mark.slow
def test_a_run_that_counts_epochs_restarts_at_the_end_of_one_and_again_in_the_next(
    tmp_path: Path,
) -> None:
    def train(folder: str, until: int) -> Ends:
        L.seed_everything(3, verbose=False)
        checkpoint = LayerwiseCheckpoint(local_dir=tmp_path / folder, every_n_train_steps=1)
        ends = Ends(checkpoint, until)
        options = {"max_steps": -1, "max_epochs": 3, "strategy": "hetero", "devices": 1}
        trainer = L.Trainer(
            **{**quiet(**options), "enable_checkpointing": True}, callbacks=[checkpoint, ends]
        )
        data = StatefulDataLoader(TokenRows(20), batch_size=4, shuffle=True)
        try:
            trainer.fit(ToyModule(ToyOptions()), data)
        except KeyError:
            assert until > 0
        return ends

    whole = train("whole", -1).steps
    assert [epoch for epoch, _ in whole.values()] == [0] * 5 + [1] * 5 + [2] * 5
    begun = {}
    for until in (5, 7, 8, 10, -1):
        steps = train("legs", until).steps
        assert not steps.keys() & begun.keys()
        begun |= steps
    assert begun.keys() == whole.keys()
    for step, (epoch, loss) in whole.items():
        assert begun[step] == (epoch, pytest.approx(loss, rel=1e-6)), f"step {step}"
