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
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args
from torchdata.stateful_dataloader import StatefulDataLoader

from examples.slow_parts import InjectFaults, SlowRank
from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.callbacks import ElasticRestart, LayerwiseCheckpoint, StragglerMonitor
from lightning_hetero.checkpoint import AwsSpotNotice, SavedCheckpoint
from lightning_hetero.straggler import Mitigation, PolicyConfig
from lightning_hetero.testing import EmulatedDevices
from tests.callbacks.faults import arm
from tests.callbacks.virtual_time import VirtualTime
from tests.toy import TokenRows, ToyModule, ToyOptions, quiet

FOLDER, NODE = Path(os.environ["FOLDER"]), os.environ["NODE"]
NUM_LAYERS = 4
SAMPLES_PER_STEP = 12
NUM_ROWS = 60


class Record(Callback):
    """Writes down each step; `begin` lines tell the starts apart."""

    def __init__(self, checkpoint: LayerwiseCheckpoint, elastic: ElasticRestart) -> None:
        self.file = FOLDER / f"{NODE}.jsonl"
        self.limit = FOLDER / "limit"
        self.checkpoint, self.elastic = checkpoint, elastic
        self.waiting: list[SavedCheckpoint] = []
        self.seen: SavedCheckpoint | None = None
        self.confirmed = -1
        self.uploading = 0
        self.samples = 0

    def write(self, **entry: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.write(
            begin=trainer.global_step,
            world_size=trainer.world_size,
            rank=trainer.global_rank,
            pipelines=[pipeline.ranks for pipeline in trainer.strategy.plan.pipelines],
            is_planned=trainer.strategy.auto_planned is not None,
        )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        self.wait_for_leave(trainer.global_step)
        if trainer.strategy.auto_planned is None:
            self.samples = zlib.crc32(batch[0].numpy().tobytes())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        step, loss = trainer.global_step, float(outputs["loss"]).hex()
        if trainer.strategy.auto_planned is None:
            pipeline = trainer.strategy.engine.place.pipeline_index
            self.write(step=step, loss=loss, pipeline=pipeline, samples=self.samples)
        else:
            self.write(step=step, loss=loss)
        self.note_checkpoints()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.write(end=trainer.global_step)

    def wait_for_leave(self, step: int) -> None:
        """Stay before a step until the test lets training go on, or SIGTERM asks to leave."""
        while self.limit.exists() and int(self.limit.read_text()) <= step:
            if self.elastic.is_leaving:
                break
            self.note_checkpoints()
            time.sleep(0.02)

    def note_checkpoints(self) -> None:
        saved = self.checkpoint.saved
        if saved is not None and saved is not self.seen:
            self.waiting.append(saved)
            self.seen = saved
        waiting, self.waiting = self.waiting, []
        states = [(item, item._local.done(), item._remote.done()) for item in waiting]
        # Noted before what is confirmed, because an upload starts before.
        uploading = len(self.checkpoint._access.writer._committer.uploads.status()["uploading"])
        if uploading != self.uploading:
            self.write(uploading=uploading)
            self.uploading = uploading
        for item, is_local, is_remote in states:
            if is_local and item._local.exception() is None and item.id.step > self.confirmed:
                self.write(confirmed=item.id.step)
                self.confirmed = item.id.step
            if not (is_local and is_remote):
                self.waiting.append(item)
            elif item._remote.exception() is None and item._remote.result():
                self.write(uploaded=item.id.step)


def two_pipelines(world_size: int) -> ParallelPlan:
    """Return a plan in which an iteration has as many samples whatever the number of ranks is."""
    half = world_size // 2
    groups = range(half), range(half, world_size)
    return ParallelPlan.from_dict({"pipelines": [{"stages": _stages(group)} for group in groups]})


def _stages(ranks: range) -> list[dict[str, Any]]:
    cuts = [round(NUM_LAYERS * i / len(ranks)) for i in range(len(ranks) + 1)]
    return [
        {"ranks": [rank], "layers": [start, stop]}
        for rank, start, stop in zip(ranks, cuts, cuts[1:], strict=False)
    ]


def watching(settings: dict[str, Any]) -> list[Callback]:
    """Return what finds one slow node, in virtual time, and asks for a restart without it."""
    policy = PolicyConfig(restart_cost_s=1e-3, allowed=(Mitigation.IGNORE, Mitigation.RESTART))
    own = int(os.environ["RANK"])
    fault = SlowRank(start=settings["slow_from"], global_rank=own, slowdown=3.0)
    return [
        VirtualTime(pytest.MonkeyPatch(), seed=own),
        InjectFaults([fault] if settings["slow_node"] == NODE else []),
        StragglerMonitor(events=FOLDER / "events", policy=policy),
    ]


def elastic_callbacks(settings: dict[str, Any]) -> list[Callback]:
    """Return what saves and restarts, and what writes it down."""
    checkpoint = LayerwiseCheckpoint(
        settings.get("remote"),
        every_n_train_steps=settings["every"],
        local_dir=FOLDER / NODE / "disk",
        replicas=settings.get("replicas", 1),
        storage_options=settings.get("storage_options"),
    )
    link = FOLDER / NODE / "memory"
    if not link.is_symlink():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(checkpoint.places.memory_dir)
    notice = None
    if "metadata_url" in settings:
        notice = AwsSpotNotice(base_url=f"{settings['metadata_url']}/{NODE}", timeout_s=30.0)
    elastic = ElasticRestart(notice)
    return [checkpoint, elastic, Record(checkpoint, elastic)]


def train() -> None:
    warnings.simplefilter("ignore")
    settings = json.loads(os.environ["ELASTIC"])
    world_size = int(os.environ["WORLD_SIZE"])
    L.seed_everything(3, verbose=False)
    callbacks = elastic_callbacks(settings)
    arm(settings.get("faults", []), FOLDER, NODE)
    plan: ParallelPlan | str = two_pipelines(world_size)
    batch_size = SAMPLES_PER_STEP // 2
    if world_size == settings.get("watched"):
        callbacks = [*watching(settings), *callbacks]
    if world_size == settings.get("planned"):
        # An iteration under an automatic plan takes a batch for each rank.
        plan, batch_size = "auto", SAMPLES_PER_STEP // world_size
        callbacks.append(EmulatedDevices([1.0 + rank for rank in range(world_size)]))
    strategy = HeteroStrategy(plan=plan, num_microbatches=2, timeout=timedelta(minutes=2))
    trainer = L.Trainer(
        strategy=strategy,
        callbacks=callbacks,
        **{**quiet(max_steps=settings["steps"]), "enable_checkpointing": True},
    )
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
