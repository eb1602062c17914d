"""What ranks do between the news that a node goes, or is to be left out, and their end."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_hetero import HeteroStrategy
from lightning_hetero.callbacks import ElasticRestart, LayerwiseCheckpoint
from lightning_hetero.checkpoint.commit import Committer
from lightning_hetero.runtime.ranks.failure import AgreedExit
from tests.processes import ProcessPool
from tests.toy import ToyModule, ToyOptions, loader, quiet

pytestmark = pytest.mark.dist


class TellsOneAfterTheOther(Callback):
    """A SIGTERM to rank 0 before a step and to rank 1 once the ranks have agreed who goes."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


class LeavesOneOut(Callback):
    """Asks after a step for a restart without rank 1's node, as a `StragglerMonitor` does."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            (elastic,) = (c for c in trainer.callbacks if isinstance(c, ElasticRestart))
            elastic.request_restart("rank 1 is slow", exclude=[1])


def leave(rank: int, folder: Path, kind: type[Callback]) -> tuple[int, bool, bool]:
    """Train until all leave; return the step, who was left out, and whether it was uploaded."""
    upload = Committer._upload
    elastic = ElasticRestart(drain_timeout_s=60.0)

    def upload_slowly(*args: Any) -> None:
        time.sleep(2.0)
        upload(*args)

    Committer._upload = upload_slowly
    torch.manual_seed(0)
    checkpoint = LayerwiseCheckpoint(
        folder / "remote", every_n_train_steps=100, local_dir=folder / f"disk{rank}"
    )
    trainer = L.Trainer(
        strategy=HeteroStrategy(),
        **{**quiet(devices=2, max_steps=6), "enable_checkpointing": True},
        callbacks=[kind(), checkpoint, elastic],
    )
    try:
        trainer.fit(ToyModule(ToyOptions()), loader(64, 4))
    except AgreedExit:
        saved = checkpoint.saved
        assert saved is not None
        is_uploaded = saved.remote.done() and saved.remote.result()
        return saved.id.step, elastic.is_leaving, is_uploaded
    finally:
        Committer._upload = upload
    raise AssertionError("nobody left")


def test_a_sigterm_that_reaches_nodes_one_after_the_other_waits_for_the_upload(
    pool: ProcessPool, tmp_path: Path
) -> None:
    assert pool.run(leave, 2, tmp_path, TellsOneAfterTheOther) == [(3, True, True)] * 2


def test_all_leave_one_step_after_a_restart_without_a_node_was_asked_for(
    pool: ProcessPool, tmp_path: Path
) -> None:
    found = pool.run(leave, 2, tmp_path, LeavesOneOut)
    assert [(step, is_out) for step, is_out, _ in found] == [(3, False), (3, True)]
