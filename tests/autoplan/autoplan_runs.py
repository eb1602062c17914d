"""Runs of emulated devices that tests of planning start in several processes."""

import os
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch

from lightning_hetero import HeteroStrategy
from lightning_hetero.autoplan import AutoPlan
from lightning_hetero.core.errors import HeteroError
from lightning_hetero.testing import EmulatedDevices
from tests.capped_memory import CappedMemory
from tests.toy import ToyModule, ToyOptions, loader, quiet
from tests.without_check import WITHOUT_CHECK


@dataclass(frozen=True, kw_only=True)
class Outcome:
    losses: list[float]
    plan: dict[str, Any]
    slowdown: float
    predicted_s: float | None
    summary: str | None
    has_times: bool


def train(
    rank: int,
    plan: Any,
    slowdowns: tuple[float, ...],
    batch_size: int,
    cache: str,
    width: int = 32,
    caps: tuple[float, ...] = (),
) -> Outcome:
    """Train on emulated devices, which may have less memory than the plan is made for."""
    os.environ["LIGHTNING_HETERO_CACHE"] = cache
    torch.manual_seed(5)
    strategy = HeteroStrategy(plan)
    kept: dict[str, Any] = {}

    class Keep(L.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            kept.update(plan=strategy.plan.to_dict(), slowdown=strategy.engine.clock.slowdown)
            kept["has_times"] = strategy.engine.clock.last is not None

    callbacks: list[L.Callback] = [EmulatedDevices(slowdowns), Keep()]
    length: dict[str, int] = {"max_epochs": 1}
    if caps:
        callbacks[:1] = [EmulatedDevices(slowdowns, memory_bytes=2**30), CappedMemory(caps)]
        length = {"max_steps": 2}
    module = ToyModule(ToyOptions(num_layers=4, width=width))
    devices = len(slowdowns)
    trainer = L.Trainer(**quiet(devices=devices, strategy=strategy, callbacks=callbacks, **length))
    with WITHOUT_CHECK if caps else nullcontext():
        trainer.fit(module, loader(48, batch_size))
    auto = strategy.auto_planned
    return Outcome(
        losses=module.losses,
        predicted_s=None if auto is None else auto.predicted_s,
        summary=None if auto is None else auto.summary,
        **kept,
    )


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
