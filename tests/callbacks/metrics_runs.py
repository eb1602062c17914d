"""A run whose scalars a test computes again from what other hooks have seen of it."""

import time
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.callbacks import (
    LayerwiseCheckpoint,
    RunMetrics,
    StragglerMonitor,
    run_metrics,
)
from lightning_hetero.core.devices import KNOWN_DEVICES
from lightning_hetero.data import HeteroDataModule
from lightning_hetero.models.batches import AssignedBatch
from tests.data.dynamic_runs import LENGTHS, Candidates, Module
from tests.data.rows import Rows
from tests.toy import ToyModule, ToyOptions, loader, quiet

DEVICE = KNOWN_DEVICES["T4"]
PLAN = {
    "pipelines": [
        {"stages": [{"ranks": [0], "layers": [0, 3]}]},
        {"stages": [{"ranks": [1], "layers": [0, 1]}, {"ranks": [2], "layers": [1, 3]}]},
    ]
}


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """What one rank saw of an iteration."""

    wall_s: float
    compute_s: float
    exchange_wait_s: float
    planning_stall_s: float
    lengths: list[int]


@dataclass
class Record(L.Callback):
    """What one rank saw of a run, and what was logged there by step."""

    clock_s: list[float] = field(default_factory=list)
    """All that the metrics have read of the time."""
    iterations: list[Iteration] = field(default_factory=list)
    checkpoint_stall_s: list[float | None] = field(default_factory=list)
    """Of the last checkpoint at each iteration's end."""
    logged: dict[int, dict[str, float]] = field(default_factory=dict)

    def perf_counter(self) -> float:
        """Stand in for the module `time`."""
        self.clock_s.append(time.perf_counter())
        return self.clock_s[-1]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, HeteroStrategy)
        times, data = strategy.engine.clock.last, trainer.datamodule
        start_s, end_s = self.clock_s[-2:]
        packed = batch.microbatches if isinstance(batch, AssignedBatch) else []
        self.iterations.append(
            Iteration(
                wall_s=end_s - start_s,
                compute_s=sum(action.compute_s for action in times.actions),
                exchange_wait_s=sum(m.wait_s for m in times.messages if m.is_exchange),
                planning_stall_s=0.0 if data is None else data.planning_stall_s,
                lengths=[n for item in packed for n in item.cu_seqlens.diff().tolist()],
            )
        )
        saved = [c.saved for c in trainer.callbacks if isinstance(c, LayerwiseCheckpoint)]
        self.checkpoint_stall_s.append(saved[0].stall_s if saved and saved[0] else None)


class Kept(DummyLogger):
    """A logger that keeps rows by step."""

    def __init__(self, rows: dict[int, dict[str, float]]) -> None:
        super().__init__()
        self.rows = rows

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows.setdefault(step, {}).update(metrics)


def train_with_all(rank: int, folder: str) -> Record:
    """Train with a data module and every callback that logs, on devices with a data sheet."""
    record = Record()
    data = HeteroDataModule(
        Rows(LENGTHS),
        tokens_per_step=60,
        context_length=31,
        lengths=LENGTHS,
        seed=2,
        num_ahead=0,
    )
    # The record stands behind the metrics, whose clock it has read when it is its turn.
    callbacks = [
        Candidates([PLAN]),
        StragglerMonitor(events=None),
        RunMetrics(),
        record,
        LayerwiseCheckpoint(folder, every_n_train_steps=3, shared_memory=False),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_metrics, "time", record)
        patch.setattr(run_metrics, "describe_device", lambda _: DEVICE)
        trainer = L.Trainer(
            **quiet(devices=3, callbacks=callbacks, logger=Kept(record.logged))
            | {
                "strategy": HeteroStrategy(plan=ParallelPlan.from_dict(PLAN)),
                "max_epochs": 1,
                "log_every_n_steps": 2,
                "enable_checkpointing": True,
            }
        )
        trainer.fit(Module(3), datamodule=data)
    return Record(**{name: getattr(record, name) for name in record.__dataclass_fields__})


def train_with_accumulation(rank: int) -> dict[int, dict[str, float]]:
    """Train on an ordinary loader, two batches a step; return what is logged."""
    record = Record()
    trainer = L.Trainer(
        **quiet(devices=2, callbacks=[RunMetrics()], logger=Kept(record.logged)),
        strategy=HeteroStrategy(num_stages=1),
        max_steps=3,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
    )
    trainer.fit(ToyModule(ToyOptions()), loader(24, 2))
    return record.logged
