"""A torchrun agent whose workers are forks of it, so that a restart needn't import torch again.

Every worker appends to a file of its own what it trained: a line per step with the loss, bit for
bit, and a checksum of its samples; a line for each checkpoint that was reported as safe.
"""

import json
import os
import random
import sys
import time
import warnings
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.callbacks import ElasticRestart, LayerwiseCheckpoint
from tests.callbacks.faults import arm
from tests.toy import TokenRows, ToyModule, ToyOptions, quiet

FOLDER, NODE = Path(os.environ["FOLDER"]), os.environ["NODE"]
NUM_LAYERS = 4
SAMPLES_PER_STEP = 12
NUM_ROWS = 60


class Record(Callback):
    """Writes down each step; `begin` lines tell the starts apart."""

    def __init__(self, checkpoint: LayerwiseCheckpoint) -> None:
        self.file = FOLDER / f"{NODE}.jsonl"
        self.checkpoint = checkpoint
        self.waiting: list[Any] = []
        self.confirmed = -1
        self.samples = 0

    def write(self, **entry: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.write(begin=trainer.global_step, rank=trainer.global_rank)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        self.samples = zlib.crc32(batch[0].numpy().tobytes())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.write(
            step=trainer.global_step,
            loss=float(outputs["loss"]).hex(),
            pipeline=trainer.strategy.engine.place.pipeline_index,
            samples=self.samples,
        )
        self.note_checkpoints()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.note_checkpoints()

    def note_checkpoints(self) -> None:
        saved = self.checkpoint.saved
        if saved is not None and saved not in self.waiting and saved.id.step > self.confirmed:
            self.waiting.append(saved)
        for item in [item for item in self.waiting if item._local.done()]:
            self.waiting.remove(item)
            if item._local.exception() is None:
                self.confirmed = item.id.step
                self.write(confirmed=self.confirmed)


class AsksForRestart(Callback):
    """Asks after a step for a restart without rank 1's node, as a `StragglerMonitor` does."""

    def __init__(self, elastic: ElasticRestart, step: int) -> None:
        self.elastic, self.step = elastic, step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step and trainer.world_size > 1:
            self.elastic.request_restart("rank 1 is slow", exclude=[1])


def elastic_callbacks(settings: dict[str, Any]) -> list[Callback]:
    """Return what saves and restarts, and what writes it down."""
    checkpoint = LayerwiseCheckpoint(
        settings.get("remote"),
        every_n_train_steps=settings["every"],
        local_dir=FOLDER / NODE / "disk",
        replicas=settings.get("replicas", 1),
    )
    link = FOLDER / NODE / "memory"
    if not link.is_symlink():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(checkpoint.places.memory_dir)
    elastic = ElasticRestart()
    asks = AsksForRestart(elastic, settings.get("restart_at", -1))
    return [checkpoint, elastic, Record(checkpoint), asks]


def train() -> None:
    warnings.simplefilter("ignore")
    settings = json.loads(os.environ["ELASTIC"])
    L.seed_everything(3, verbose=False)
    callbacks = elastic_callbacks(settings)
    arm(settings.get("faults", []), FOLDER, NODE)
    world_size = int(os.environ["WORLD_SIZE"])
    plan = ParallelPlan.even(world_size=world_size, num_layers=NUM_LAYERS)
    strategy = HeteroStrategy(plan=plan, num_microbatches=2, timeout=timedelta(minutes=2))
    trainer = L.Trainer(
        strategy=strategy,
        callbacks=callbacks,
        **{**quiet(max_steps=settings["steps"]), "enable_checkpointing": True},
    )
    batch_size = SAMPLES_PER_STEP // world_size
    loader = StatefulDataLoader(TokenRows(NUM_ROWS), batch_size=batch_size, shuffle=True)
    trainer.fit(ToyModule(ToyOptions(num_layers=NUM_LAYERS)), loader)


def hasten_rendezvous() -> None:
    """Do without what spares the store of a large cluster: a second for each look at the others.

    Nor is the name of a caller looked for in all modules, which takes longer than the rendezvous.
    """
    dynamic_rendezvous._delay = lambda seconds: time.sleep(random.uniform(0.02, 0.1))
    dynamic_rendezvous._BackendRendezvousStateHolder.__init__.__defaults__ = (0,)
    dynamic_rendezvous.get_method_name = lambda depth=2: ""


def main() -> None:
    torch.set_num_threads(1)
    hasten_rendezvous()
    config, _, _ = config_from_args(parse_args([*sys.argv[1:], "--start-method=fork", "none"]))
    elastic_launch(config, train)()


if __name__ == "__main__":
    main()
