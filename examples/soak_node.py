"""One node of `soak.py`: a torchrun agent with one worker, or the whole undisturbed run.

The agent forks its worker, so that a restart needn't import torch again. Two things fail when a
file says so: the node's disk, which is full then, and the remote store, which answers 500.
"""

import errno
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import lightning as L
import torch
from fsspec.implementations.local import LocalFileSystem
from local_nodes import launch, quiet_trainer, write_to
from text_data import VOCAB_SIZE, PythonSourceDataset
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from train_text import TextLM

from lightning_hetero import (
    ElasticRestart,
    HeteroStrategy,
    LayerwiseCheckpoint,
    ParallelPlan,
    RunLog,
)
from lightning_hetero.checkpoint import LocalStore
from lightning_hetero.data import HeteroDataModule
from lightning_hetero.strategy.run import note

NUM_LAYERS = 3
TEXT = PythonSourceDataset("train", context_length=64, max_files=8)
"""Read once: all processes are forks of one that has it, and looking for files takes seconds."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all nodes of a run are told alike."""

    folder: Path
    """Where the run writes; stands for what all nodes can reach."""
    rendezvous_port: int = 0
    timeout_s: float = 6.0
    """How long a rank waits for another."""
    pace_s: float = 0.1
    """Least seconds of a step, so that a drill trains as many steps on any machine."""
    every_n_train_steps: int = 5
    """Steps between checkpoints."""
    num_steps: int = -1
    """Where the run ends if nobody orders it to end before."""

    @property
    def events(self) -> Path:
        """The run's log."""
        return self.folder / "events.jsonl"

    @property
    def remote(self) -> Path:
        """What the remote store keeps."""
        return self.folder / "remote"

    @property
    def store_fails(self) -> Path:
        """While it exists the remote store answers 500."""
        return self.folder / "store-fails"

    @property
    def is_last(self) -> Path:
        """Once it exists the run ends after its next step."""
        return self.folder / "is-last"

    def disk(self, node: str) -> Path:
        """Return a node's own disk."""
        return self.folder / "disks" / node

    def disk_is_full(self, node: str) -> Path:
        """Return what exists while a node's disk is full."""
        return self.folder / f"{node}-is-full"


class UnreliableStore(LocalFileSystem):
    """A remote store in a folder: slow, and it answers 500 while a file exists."""

    protocol = "soak"

    def __init__(self, fails: str, **options: Any) -> None:
        super().__init__(**options)
        self.fails = fails

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(item) for item in path]
        return super()._strip_protocol(str(path).removeprefix("soak://"))

    def _answer(self) -> None:
        time.sleep(0.02)
        if os.path.exists(self.fails):
            raise OSError("500 Internal Server Error")

    def _open(self, *args: Any, **options: Any) -> Any:
        self._answer()
        return super()._open(*args, **options)

    def cat_file(self, *args: Any, **options: Any) -> Any:
        """Read a file."""
        self._answer()
        return super().cat_file(*args, **options)

    def ls(self, *args: Any, **options: Any) -> Any:
        """List a folder."""
        self._answer()
        return super().ls(*args, **options)

    def mv(self, *args: Any, **options: Any) -> Any:
        """Move a file."""
        self._answer()
        return super().mv(*args, **options)

    def rm(self, *args: Any, **options: Any) -> Any:
        """Delete files."""
        self._answer()
        return super().rm(*args, **options)


class SmallLM(TextLM):
    """A language model whose losses can be compared over a thousand steps."""

    def configure_optimizers(self) -> Any:
        """Return SGD whose learning rate falls: training at a constant one amplifies rounding."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.004, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 50))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Trained(L.Callback):
    """Notes every step and its loss, keeps the pace, and ends the run when it was ordered to."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def on_train_batch_start(self, *_: Any) -> None:
        """Keep the pace."""
        time.sleep(self.settings.pace_s)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Note the step before it is saved, so that no saved step is missing."""
        note(trainer, "trained", loss=float(outputs["loss"]))
        if trainer.strategy.broadcast(self.settings.is_last.exists()):
            trainer.should_stop = True


def fill_disk(settings: Settings, node: str) -> None:
    """Let this process's disk be full while a file says so."""
    write, disk, flag = LocalStore.write, str(settings.disk(node)), settings.disk_is_full(node)

    def write_if_there_is_space(self: LocalStore, name: str, chunks: Any) -> None:
        if str(self) == disk and flag.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        write(self, name, chunks)

    LocalStore.write = write_if_there_is_space  # type: ignore[method-assign]


def two_pipelines(world_size: int) -> ParallelPlan:
    """Return a plan for two or three ranks: one rank alone, the others in stages."""
    cuts = [round(NUM_LAYERS * i / (world_size - 1)) for i in range(world_size)]
    stages = [
        {"ranks": [rank], "layers": [start, stop]}
        for rank, start, stop in zip(range(1, world_size), cuts, cuts[1:], strict=False)
    ]
    alone = [{"ranks": [0], "layers": [0, NUM_LAYERS]}]
    return ParallelPlan.from_dict({"pipelines": [{"stages": alone}, {"stages": stages}]})


def checkpoint_of(settings: Settings, node: str) -> LayerwiseCheckpoint:
    """Return what saves on a node, which has a disk and a memory of its own."""
    fsspec.register_implementation("soak", UnreliableStore, clobber=True)
    return LayerwiseCheckpoint(
        f"soak://{settings.remote}",
        every_n_train_steps=settings.every_n_train_steps,
        local_dir=settings.disk(node),
        replicas=2,
        storage_options={"fails": str(settings.store_fails)},
    )


def fit(settings: Settings, strategy: Any, callbacks: Sequence[L.Callback]) -> None:
    """Train as the settings say, under any strategy."""
    trainer = quiet_trainer(
        strategy,
        callbacks=[Trained(settings), *callbacks],
        max_steps=settings.num_steps,
        limit_val_batches=0,
        default_root_dir=settings.folder,
        logger=False,
    )
    sizes = {"hidden_size": 32, "num_layers": NUM_LAYERS, "num_heads": 2}
    model = SmallLM(
        model={"vocab_size": VOCAB_SIZE, **sizes}, learning_rate=0.01, warmup_steps=1, num_steps=1
    )
    data = HeteroDataModule(
        TEXT,
        tokens_per_step=256,
        context_length=64,
        lengths=[len(sample) for sample in TEXT.samples],
        num_ahead=0,
    )
    trainer.fit(model, data)


def work(settings: Settings, node: str) -> None:
    """Train on this node, together with whoever is there."""
    fill_disk(settings, node)
    strategy = HeteroStrategy(
        two_pipelines(int(os.environ["WORLD_SIZE"])),
        timeout=timedelta(seconds=settings.timeout_s),
    )
    elastic = ElasticRestart(drain_timeout_s=5.0)
    run_log = RunLog(settings.events, node=node)
    fit(settings, strategy, [checkpoint_of(settings, node), elastic, run_log])


def hasten_rendezvous() -> None:
    """Do without what spares the store of a large cluster: a second for each look at the others."""
    dynamic_rendezvous._delay = lambda seconds: time.sleep(random.uniform(0.05, 0.15))
    dynamic_rendezvous._BackendRendezvousStateHolder.__init__.__defaults__ = (0,)


def be_agent(settings: Settings, node: str) -> None:
    """Be a node's torchrun; it and its workers write to a file of the node."""
    write_to(settings.folder / f"{node}.log")
    hasten_rendezvous()
    options = [
        "--nnodes=2:3", "--max-restarts=100000", "--rdzv-id=soak",
        "--rdzv-conf=is_host=false,last_call_timeout=2,keep_alive_interval=1,"
        "keep_alive_max_attempt=4",
    ]  # fmt: skip
    launch(work, settings, node, options=options, port=settings.rendezvous_port)


def train_alone(settings: Settings) -> None:
    """Train in one process of plain Lightning."""
    fit(settings, "auto", [RunLog(settings.events)])
