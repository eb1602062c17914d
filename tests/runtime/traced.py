"""Trace one iteration with `torch.profiler`."""

from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lightning_hetero import HeteroStrategy, ParallelPlan
from tests.toy import TokenRows, ToyModule, ToyOptions, quiet

TRACED_STEP = 2
"""The first iterations learn which weights travel where."""


@dataclass(frozen=True)
class Span:
    """One range of a trace; times in microseconds."""

    name: str
    start: float
    stop: float


class TraceStep(L.Callback):
    """Traces the iteration that follows `TRACED_STEP` others."""

    def __init__(self) -> None:
        self.profiler = profile(activities=[ProfilerActivity.CPU])

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == TRACED_STEP:
            self.profiler.start()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == TRACED_STEP + 1:
            self.profiler.stop()


def trace(rank: int, plan: dict[str, Any], options: ToyOptions, batch_size: int) -> list[Span]:
    """Return the ranges of one iteration on this rank."""
    torch.manual_seed(0)
    parsed = ParallelPlan.from_dict(plan)
    callback = TraceStep()
    trainer = L.Trainer(
        strategy=HeteroStrategy(parsed, num_microbatches=2),
        callbacks=[callback],
        **quiet(devices=len(parsed.ranks), max_steps=TRACED_STEP + 1),
    )
    rows = TokenRows(batch_size * parsed.num_pipelines * (TRACED_STEP + 1))
    trainer.fit(ToyModule(options), DataLoader(rows, batch_size=batch_size))
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in callback.profiler.events() or ()
    ]
