"""Runs on the accelerator and, for comparison, on the CPU; they return plain data."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch import Tensor

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.exchange.messages import SideStream
from lightning_hetero.runtime.exchange.pushed_parcels import PushedParcels
from tests.accelerator import device, streams
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
    breaks_at: int | None = None
    """Batch whose gradients aren't finite; rank 0 is late in the next one."""
    folder: str = ""
    """Where a checkpoint is written half-way, from which the run then begins again."""
    options: tuple[tuple[str, Any], ...] = ()
    clip: float | None = None
    """Norm to which gradients are clipped."""
    optimizer: str = "adamw"
    leaves_out_waits: bool = False
    """Plants side streams that wait for no computation, and sends that nobody waits for."""


@dataclass(frozen=True)
class Found:
    """What one rank has of a run."""

    losses: list[float]
    weights: dict[str, list[float]]
    waits: Counter[tuple[str, str]]
    """Those of steady iterations."""
    told: str = ""
    """The error that ended the run."""
    owned_on: frozenset[str] = frozenset()
    """The devices of slices and optimizer states."""
    clashes: frozenset[str] = frozenset()
    """What streams do to each other's memory."""
    num_shared: int = 0
    """Allocations that several streams have used."""


class _Module(ToyModule):
    def __init__(self, job: Job) -> None:
        super().__init__(ToyOptions(width=8, optimizer=job.optimizer))
        self._job = job

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self._job.reads_loss:
            float(loss)
        self.log("train_loss", loss)
        if batch_idx - 1 == self._job.breaks_at and self.global_rank == 0:
            time.sleep(0.5)
        return loss * float("nan") if batch_idx == self._job.breaks_at else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


class _Look(L.Callback):
    """Keeps losses and waits, changes the plan, and writes a checkpoint at the end."""

    def __init__(self, plans: list[ParallelPlan], path: str | None) -> None:
        self._plans = plans
        self._path = path
        self.losses: list[Tensor] = []
        self.waits: Counter[tuple[str, str]] = Counter()
        self.weights: dict[str, list[float]] = {}
        self.owned_on: frozenset[str] = frozenset()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        if trainer.global_step > STEADY:
            self.waits.update(device.waits)  # Also what comes before a batch, such as Lightning's.
        device.waits.clear()
        self.losses.append(outputs["loss"])
        strategy: Any = trainer.strategy
        strategy.change_plan(self._plans[trainer.global_step // 2 % len(self._plans)])

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        strategy: Any = trainer.strategy
        if self._path is not None:
            trainer.save_checkpoint(self._path)
        states = [trainer.optimizers[0].state[p] for p in module.parameters()]
        moments = [item[key] for item in states for key in item if key != "step"]
        self.owned_on = frozenset(t.device.type for t in (*module.parameters(), *moments))
        state = strategy.whole_state_dict()
        self.weights = {name: value.cpu().flatten().tolist() for name, value in state.items()}


def train_on_streams(rank: int, job: Job) -> Found:
    """Train where exchanges run on a stream of their own."""
    device.install()
    with streams.watched() as watch, without_waits() if job.leaves_out_waits else nullcontext():
        found = train(rank, job)
    return replace(found, clashes=frozenset(watch.found), num_shared=watch.num_shared)


@contextmanager
def without_waits() -> Iterator[None]:
    """Leave waits of exchanges out."""

    @contextmanager
    def beside_compute(side: Any) -> Iterator[None]:
        with torch.cuda.stream(side._stream):
            yield

    def forget(unit: Any) -> None:
        # Gloo would never send what is let go before the other rank receives it; no stream hears of
        # that wait.
        for work in unit._sends:
            work._work.wait()
        unit._sends, unit._kept, unit._parts = [], [], None

    with (
        mock.patch.object(SideStream, "after_compute", beside_compute),
        mock.patch.object(PushedParcels, "finish", forget),
    ):
        yield


def train(rank: int, job: Job) -> Found:
    """Train, and if there is a folder, train again from its checkpoint on."""
    if job.on_accelerator:
        device.install()
    plans = [ParallelPlan.from_dict(plan) for plan in job.plans]
    losses: list[Tensor] = []
    waits: Counter[tuple[str, str]] = Counter()
    steps = (NUM_STEPS // 2, NUM_STEPS) if job.folder else (NUM_STEPS,)
    path = str(Path(job.folder) / "half.ckpt") if job.folder else None
    for begins_again, max_steps in enumerate(steps):
        torch.manual_seed(0)
        look = _Look(plans, path)
        strategy = HeteroStrategy(
            plans[0],
            num_microbatches=2,
            **dict(job.options),
        )
        accelerator = device.TestAccelerator() if job.on_accelerator else "cpu"
        options = {
            "accelerator": accelerator,
            "devices": job.world_size,
            "max_steps": max_steps,
            "gradient_clip_val": job.clip,
        }
        trainer = L.Trainer(
            strategy=strategy, callbacks=[look], **(quiet(num_sanity_val_steps=0) | options)
        )
        module = _Module(job)
        rows = ROWS * plans[0].num_pipelines * NUM_STEPS
        loaders = loader(rows, ROWS), loader(ROWS, ROWS, seed=1)
        try:
            trainer.fit(module, *loaders, ckpt_path=path if begins_again else None)
        except StepError as error:
            told = f"{error} Cause: {error.__cause__!r}."
            return Found([float(loss) for loss in look.losses], {}, waits, told)
        losses += look.losses
        waits += look.waits
    return Found([float(loss) for loss in losses], look.weights, waits, owned_on=look.owned_on)
