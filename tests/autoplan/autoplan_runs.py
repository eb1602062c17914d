"""Runs of emulated devices that tests of planning start in several processes."""

import os
from contextlib import nullcontext
from typing import Any

import lightning as L
import torch

from lightning_hetero import HeteroStrategy
from lightning_hetero.autoplan import AutoPlan
from lightning_hetero.core.errors import HeteroError
from lightning_hetero.testing import EmulatedDevices
from tests import fits
from tests.capped_memory import CappedMemory
from tests.fits import Case
from tests.toy import ToyModule, ToyOptions, loader, quiet
from tests.without_check import WITHOUT_CHECK


class Planned(L.Callback):
    """What a rank knows of the plan that it trained, and of its device."""

    losses: list[float]
    predicted_s: float | None = None
    summary: str | None = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        strategy = trainer.strategy
        self.plan: dict[str, Any] = strategy.plan.to_dict()
        self.slowdown: float = strategy.engine.clock.slowdown
        self.has_times = strategy.engine.clock.last is not None
        self.losses = pl_module.losses
        if strategy.auto_planned is not None:
            auto = strategy.auto_planned
            self.predicted_s, self.summary = auto.predicted_s, auto.summary


def train(
    rank: int,
    plan: Any,
    slowdowns: tuple[float, ...],
    batch_size: int,
    cache: str,
    width: int = 32,
    caps: tuple[float, ...] = (),
) -> Planned:
    """Train on emulated devices, which may have less memory than the plan is made for."""
    os.environ["LIGHTNING_HETERO_CACHE"] = cache
    how: dict[str, Any] = {"num_layers": 4, "width": width, "num_rows": 48}
    how |= {"batch_size": batch_size, "world_size": len(slowdowns), "options": {"plan": plan}}
    callbacks: list[L.Callback] = [EmulatedDevices(slowdowns)]
    if caps:
        callbacks = [EmulatedDevices(slowdowns, memory_bytes=2**30), CappedMemory(caps)]
        how |= {"max_epochs": -1, "max_steps": 2}
    with WITHOUT_CHECK if caps else nullcontext():
        fits.train(Case(**how), *callbacks, planned := Planned())
    return planned


class Growing(ToyModule):
    """Asks for much memory at once, on rank 1: in a callback's hook or in validation."""

    def __init__(self, where: str) -> None:
        super().__init__(ToyOptions(num_layers=2))
        self.where = where

    def grow(self, where: str) -> None:
        if (where, self.global_rank) == (self.where, 1):
            torch.ones(2**22)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.grow("hook")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.grow("validation")
        super().validation_step(batch, batch_idx)


def fail_in(rank: int, where: str, cache: str) -> str:
    """Return the error, with its notes, of a run whose memory ends outside of training steps."""
    os.environ["LIGHTNING_HETERO_CACHE"] = cache
    torch.manual_seed(5)
    callbacks = [EmulatedDevices((1.0, 1.0), memory_bytes=2**30), CappedMemory((2**40, 8e6))]
    options = quiet(devices=2, max_epochs=1, callbacks=callbacks, num_sanity_val_steps=0)
    trainer = L.Trainer(strategy=HeteroStrategy(AutoPlan(microbatch_sizes=(1,))), **options)
    try:
        trainer.fit(Growing(where), loader(8, 4), loader(8, 4))
    except (RuntimeError, HeteroError) as error:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    return "trained"
