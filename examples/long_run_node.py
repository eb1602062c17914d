"""One node of `long_run.py`: a torchrun agent with one worker, or the whole undisturbed run.

The agent forks its worker, so that a restart needn't import torch again. Beside what any run has,
there are

- `EmulatedDevices`, which makes this node as slow and as small as it is said to be,
- `Orders`, which slows a node or a link down when the file of orders says so,
- `Trained`, which notes of every step its samples and its loss, to compare runs by.
"""

import json
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hetero import SourceData
from lightning.pytorch.loggers import CSVLogger
from local_nodes import launch, quiet_trainer, write_to
from slow_parts import Fault, InjectFaults, SlowLink, SlowRank
from text_data import VOCAB_SIZE
from train_text import TextLM

from lightning_hetero import (
    ElasticRestart,
    HeteroStrategy,
    LayerwiseCheckpoint,
    RunLog,
    RunMetrics,
    StragglerMonitor,
)
from lightning_hetero.checkpoint import AwsSpotNotice
from lightning_hetero.models.batches import AssignedBatch
from lightning_hetero.strategy.run import note
from lightning_hetero.testing import EmulatedDevices


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all nodes of a run are told alike."""

    folder: Path
    """Where the run writes; stands for what all nodes can reach."""
    rendezvous_port: int = 0
    metadata_url: str = ""
    """The cloud's metadata server."""
    hidden_size: int = 64
    num_layers: int = 4
    tokens_per_step: int = 1024
    context_length: int = 256
    max_files: int = 60
    memory_bytes: int = 26 * 2**18
    """Of each device: too small for the whole model with a long sample, enough with short ones."""
    first_callback: str = ""
    """Function that makes a callback to stand before all others, as "module:function"."""
    num_steps: int = 10_000
    """Where the run ends if nobody orders it to end before."""

    @property
    def events(self) -> Path:
        """The run's log."""
        return self.folder / "events.jsonl"

    @property
    def orders(self) -> Path:
        """The file in which the run is told what is slow, and when to end."""
        return self.folder / "orders.json"


class Orders(InjectFaults):
    """Slow nodes and links, and the end, as a file orders: rank 0 reads it before every step."""

    def __init__(self, path: Path, run_log: RunLog) -> None:
        super().__init__([])
        self.path = path
        self.run_log = run_log
        self.is_last = False

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        """Do what is ordered, on all ranks from the same step on."""
        orders = trainer.strategy.broadcast(json.loads(self.path.read_text()))
        self.is_last = orders["end"]
        self.faults = tuple(map(self._fault, orders["faults"]))
        super().on_train_batch_start(trainer, *args)

    def _fault(self, order: dict[str, Any]) -> Fault:
        ranks = [self.run_log.nodes.index(node) for node in order["nodes"]]
        if len(ranks) == 1:
            return SlowRank(start=0, global_rank=ranks[0], slowdown=order["slowdown"])
        return SlowLink(start=0, ranks=(ranks[0], ranks[1]), bytes_per_s=order["bytes_per_s"])

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """End the run when it was ordered to."""
        trainer.should_stop = trainer.should_stop or self.is_last


class Trained(L.Callback):
    """Notes which samples a step has really trained, its loss, and what this process computed."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self._start_s = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        """Start the clock of this process's own computing."""
        self._start_s = time.process_time()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Gather what the pipelines had."""
        cpu_s = time.process_time() - self._start_s
        found = [samples_of(batch)]
        strategy = trainer.strategy
        if isinstance(strategy, HeteroStrategy):
            place = strategy.engine.place
            speaks = place is not None and place.stage_index == 0
            found = [[]] * trainer.world_size
            torch.distributed.all_gather_object(
                found, samples_of(batch) if speaks else [], group=strategy.engine.comms.control
            )
        note(
            trainer,
            "trained",
            samples=[checksum for samples in found for checksum, _ in samples],
            num_tokens=sum(length for samples in found for _, length in samples),
            loss=float(outputs["loss"]),
            cpu_s=cpu_s,
        )
        # Unlike `max_steps`, this ends with a validation.
        trainer.should_stop = trainer.should_stop or trainer.global_step >= self.num_steps


def samples_of(batch: Any) -> list[tuple[int, int]]:
    """Return a checksum and the tokens of each sample of a batch."""
    packed = batch.microbatches if isinstance(batch, AssignedBatch) else [batch]
    return [
        (zlib.crc32(row.numpy().tobytes()), len(row))
        for item in packed
        for row in item.input_ids.split(item.lengths)
    ]


def checkpoint_of(settings: Settings, node: str) -> LayerwiseCheckpoint:
    """Return what saves on a node, which has a disk and a memory of its own."""
    return LayerwiseCheckpoint(
        settings.folder / "checkpoints",
        every_n_train_steps=5,
        local_dir=settings.folder / "disks" / node,
        replicas=2,
    )


def fit(settings: Settings, strategy: Any, callbacks: Sequence[L.Callback]) -> None:
    """Train as the settings say, under any strategy."""
    trainer = quiet_trainer(
        strategy,
        callbacks=[*callbacks, Trained(settings.num_steps)],
        limit_val_batches=4,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        default_root_dir=settings.folder,
        logger=CSVLogger(settings.folder, name="logs"),
    )
    sizes = {"hidden_size": settings.hidden_size, "num_layers": settings.num_layers}
    model = TextLM(
        model={"vocab_size": VOCAB_SIZE, "num_heads": 4, "num_kv_heads": 2, **sizes},
        learning_rate=1e-3,
        warmup_steps=10,
        num_steps=10_000,
    )
    data = SourceData(
        context_length=settings.context_length,
        tokens_per_step=settings.tokens_per_step,
        max_files=settings.max_files,
    )
    trainer.fit(model, data)


def work(settings: Settings, node: str, slowdown: float) -> None:
    """Train on this node's device, together with whoever is there."""
    run_log = RunLog(settings.events, node=node)
    module, _, function = settings.first_callback.partition(":")
    first = [getattr(import_module(module), function)()] if module else []
    notice = AwsSpotNotice(base_url=f"{settings.metadata_url}/{node}", timeout_s=10.0)
    fit(
        settings,
        HeteroStrategy(num_candidate_plans=4),
        [
            *first,
            EmulatedDevices(slowdown, memory_bytes=settings.memory_bytes),
            checkpoint_of(settings, node),
            ElasticRestart(notice),
            StragglerMonitor(recheck_share=0.3),  # A small model's links are soon probed.
            RunMetrics(),
            Orders(settings.orders, run_log),
            run_log,
        ],
    )


def be_agent(settings: Settings, node: str, slowdown: float) -> None:
    """Be a node's torchrun; it and its workers write to a file of the node."""
    write_to(settings.folder / f"{node}.log")
    options = [
        # At least more than half, or nodes that don't find each other would train two runs.
        "--nnodes=3:4", "--max-restarts=20", "--rdzv-id=long-run",
        "--rdzv-conf=is_host=false,last_call_timeout=2,keep_alive_interval=1,"
        "keep_alive_max_attempt=8",
    ]  # fmt: skip
    launch(work, settings, node, slowdown, options=options, port=settings.rendezvous_port)


def train_alone(settings: Settings) -> None:
    """Train in one process of plain Lightning."""
    fit(settings, "auto", [RunLog(settings.events)])
