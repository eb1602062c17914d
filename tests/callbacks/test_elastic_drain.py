"""What ranks do between the news that a node goes and their end."""

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
from lightning_hetero.checkpoint.storing import Uploads
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


def leave(rank: int, folder: Path) -> bool:
    """Train until all leave; return whether this rank's part was in the remote store by then."""
    upload = Uploads._upload

    def upload_slowly(*args: Any) -> None:
        time.sleep(2.0)
        upload(*args)

    Uploads._upload = upload_slowly
    torch.manual_seed(0)
    checkpoint = LayerwiseCheckpoint(
        folder / "remote", every_n_train_steps=100, local_dir=folder / f"disk{rank}"
    )
    trainer = L.Trainer(
        strategy=HeteroStrategy(),
        **{**quiet(devices=2, max_steps=6), "enable_checkpointing": True},
        callbacks=[TellsOneAfterTheOther(), checkpoint, ElasticRestart(drain_timeout_s=60.0)],
    )
    try:
        trainer.fit(ToyModule(ToyOptions()), loader(64, 4))
    except AgreedExit:
        saved = checkpoint.saved
        assert saved is not None
        return saved._remote.done() and saved._remote.result()
    finally:
        Uploads._upload = upload
    raise AssertionError("nobody left")


def test_a_sigterm_that_reaches_nodes_one_after_the_other_waits_for_the_upload(
    pool: ProcessPool, tmp_path: Path
) -> None:
    assert pool.run(leave, 2, tmp_path) == [True, True]
