"""What of pull and push is hidden behind the computation, and a trace that shows it.

Two ranks, one pipeline each, so each sends half of the parameters and receives half, twice. Peer:
the same run that waits for all weights before its first forward, and posts all gradients behind its
last backward. Floor: no wait but for the first unit's weights and the last one's gradients; with as
many processes as cores, what carries the bytes takes its time from the computation.

`python -m tests.benchmarks.bench_overlap FOLDER` writes each rank's trace, for Perfetto or
chrome://tracing: "pull.wait" and "push.post" lie inside "F0" and the last "B", beside gloo's
sends and receives.
"""

import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_hetero import HeteroStrategy
from lightning_hetero.runtime.exchange.pull import Pull
from lightning_hetero.runtime.exchange.push import Push
from tests.benchmarks.harness import Row
from tests.processes import ProcessPool
from tests.runtime.runs import pipeline, plan_of, stage
from tests.runtime.traced import trace
from tests.toy import TokenRows, ToyModule, ToyOptions, quiet

OPTIONS = ToyOptions(num_layers=6, width=512)
ROWS = 64
STEPS = 12
REPEATS = 4


class Waits(L.Callback):
    """Seconds of each step, and those for which it stood still for pull or push."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.waits: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.steps.append(time.perf_counter() - self._start)
        assert isinstance(trainer.strategy, HeteroStrategy)
        times = trainer.strategy.engine.clock.last
        assert times is not None
        self.waits.append(sum(item.wait_s for item in times.messages if item.is_exchange))


def exchange_apart() -> ExitStack:
    """Return a context in which nothing overlaps."""
    start = Pull.start

    def start_and_finish(pull: Pull) -> None:
        start(pull)
        pull.finish()

    stack = ExitStack()
    stack.enter_context(mock.patch.object(Pull, "start", start_and_finish))
    stack.enter_context(mock.patch.object(Push, "unit_ready"))
    return stack


def train(*, apart: bool) -> Waits:
    waits = Waits()
    trainer = L.Trainer(
        strategy=HeteroStrategy(num_stages=1),
        callbacks=[waits],
        **quiet(devices=2, max_steps=STEPS, limit_val_batches=0),
    )
    torch.manual_seed(0)
    with exchange_apart() if apart else ExitStack():
        trainer.fit(ToyModule(OPTIONS), DataLoader(TokenRows(2 * ROWS * STEPS), batch_size=ROWS))
    return waits


def measure(rank: int) -> list[float]:
    """Return median seconds: (waits, waits apart, step, step apart)."""
    runs: dict[bool, list[Waits]] = {False: [], True: []}
    for _ in range(REPEATS):
        for apart, done in runs.items():
            done.append(train(apart=apart))
    return [
        statistics.median(value for run in runs[apart] for value in getattr(run, name)[2:])
        for name in ("waits", "steps")
        for apart in (False, True)
    ]


def run() -> list[Row]:
    """Compare the exposed exchange, and the step, with the same exchange apart from computing."""
    pool = ProcessPool()
    figures = [max(column) for column in zip(*pool.run(measure, 2, timeout_s=500), strict=True)]
    pool.close()
    size = sum(p.numel() * 4 for p in ToyModule(OPTIONS).parameters()) / 1e6
    names = (f"standing still for pull and push, {size:.0f} MB", "step of these two ranks")
    return [
        Row(
            name=name, ours=ours, peer=peer, unit="s", target=target, better="lower",
            kind="measured", value=ours / peer, note="the same without overlap",
        )
        for name, ours, peer, target in zip(
            names, figures[::2], figures[1::2], (0.8, 1.05), strict=True
        )
    ]  # fmt: skip


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    both = ProcessPool()
    plan = plan_of(pipeline(stage(0, 0, 6)), pipeline(stage(1, 0, 6)))
    both.run(trace, 2, plan, OPTIONS, ROWS, str(folder))
    both.close()
    print(*sorted(folder.glob("rank*.json")), sep="\n")
