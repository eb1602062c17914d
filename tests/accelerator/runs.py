"""Runs on the accelerator and, for comparison, on the CPU; they return plain data."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_hetero import HeteroStrategy, ParallelPlan
from tests.accelerator import device
from tests.toy import ToyModule, ToyOptions, loader, quiet

NUM_STEPS = 6
STEADY = 3
"""Steps after which a plan has been seen by all that learns from the first ones."""
ROWS = 4


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained; a run of several plans changes them after each second step."""

    plans: tuple[dict[str, Any], ...]
    world_size: int = 2
    on_accelerator: bool = True
    reads_loss: bool = False
    """Plants a wait into the user's step."""
    folder: str = ""
    """Where a checkpoint is written half-way, from which the run then begins again."""
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Found:
    """What one rank has of a run."""

    losses: list[float]
    weights: dict[str, list[float]]
    waits: Counter[tuple[str, str]]
    """Those of steady iterations."""


class _Module(ToyModule):
    def __init__(self, job: Job) -> None:
        super().__init__(ToyOptions(width=8))
        self._job = job

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self._job.reads_loss:
            float(loss)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


class _Look(L.Callback):
    """Keeps losses and waits, and changes the plan."""

    def __init__(self, plans: list[ParallelPlan]) -> None:
        self._plans = plans
        self.losses: list[Tensor] = []
        self.waits: Counter[tuple[str, str]] = Counter()

    def on_train_batch_start(self, *_: Any) -> None:
        device.waits.clear()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        if trainer.global_step > STEADY:
            self.waits.update(device.waits)
        self.losses.append(outputs["loss"])
        strategy: Any = trainer.strategy
        strategy.change_plan(self._plans[trainer.global_step // 2 % len(self._plans)])


def train(rank: int, job: Job) -> Found:
    """Train, and if there is a folder, train again from its checkpoint on."""
    if job.on_accelerator:
        device.install()
    plans = [ParallelPlan.from_dict(plan) for plan in job.plans]
    losses: list[Tensor] = []
    waits: Counter[tuple[str, str]] = Counter()
    steps = (NUM_STEPS // 2, NUM_STEPS) if job.folder else (NUM_STEPS,)
    path = None
    for max_steps in steps:
        torch.manual_seed(0)
        look = _Look(plans)
        strategy = HeteroStrategy(
            plans[0],
            num_microbatches=2,
            **dict(job.options),
        )
        accelerator = device.TestAccelerator() if job.on_accelerator else "cpu"
        options = {"accelerator": accelerator, "devices": job.world_size, "max_steps": max_steps}
        trainer = L.Trainer(
            strategy=strategy, callbacks=[look], **(quiet(num_sanity_val_steps=0) | options)
        )
        module = _Module(job)
        rows = ROWS * plans[0].num_pipelines * NUM_STEPS
        trainer.fit(module, loader(rows, ROWS), loader(ROWS, ROWS, seed=1), ckpt_path=path)
        losses += look.losses
        waits += look.waits
        if job.folder and path is None:
            path = str(Path(job.folder) / "half.ckpt")
            trainer.save_checkpoint(path)
    state = strategy.whole_state_dict()
    return Found(
        [float(loss) for loss in losses],
        {name: value.detach().cpu().flatten().tolist() for name, value in state.items()},
        waits,
    )
