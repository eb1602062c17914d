"""Solved schedules against 1F1B: four stages of emulated devices, really run.

Forwards and backwards are stretched by sleeping, as in `bench_emulated`, so four stages run on two
cores. Runs of both schedules take turns; each ratio is a median over pairs. What the solver
predicts of the same stages stands beside it.
"""

import statistics
import time
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroStrategy
from lightning_hetero.models import HeteroLM, LMConfig, packed_cross_entropy
from lightning_hetero.schedules import ScheduleProblem, end_s, order_1f1b, solve
from lightning_hetero.testing import EmulatedDevices
from tests.benchmarks.harness import Row
from tests.processes import ProcessPool
from tests.toy import quiet

EQUAL = (12.0, 12.0, 12.0, 12.0)
UNEQUAL = (8.0, 8.0, 16.0, 16.0)
"""Stages of speed 2 : 2 : 1 : 1, which take 1 : 1 : 2 : 2."""
LENGTH = 64
ROWS = 1
"""Rows of a micro-batch."""
NUM_ITERATIONS = 8
REPEATS = 3
CONFIG = LMConfig(vocab_size=64, hidden_size=256, num_layers=4, num_heads=4, intermediate_size=1024)


class Rows(L.LightningModule):
    """The reference model on rows of equal length."""

    def __init__(self) -> None:
        super().__init__()
        self.model = HeteroLM(CONFIG)
        self.seconds: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch
        rows, length = ids.shape
        starts = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
        positions = torch.arange(length).repeat(rows)
        logits = self.model(ids.reshape(-1), starts, positions, length)
        return packed_cross_entropy(logits, ids.reshape(-1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._start_s = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seconds.append(time.perf_counter() - self._start_s)


def train(rank: int, slowdowns: tuple[float, ...], num_microbatches: int, schedule: str) -> float:
    """Return the median seconds of an iteration, the first ones left out."""
    torch.manual_seed(1)
    module = Rows()
    stages = [{"ranks": [i], "layers": [i, i + 1]} for i in range(len(slowdowns))]
    plan = {"pipelines": [{"stages": stages, "num_microbatches": num_microbatches}]}
    trainer = L.Trainer(
        **quiet(
            devices=len(slowdowns),
            strategy=HeteroStrategy(plan, schedule=schedule),
            max_steps=NUM_ITERATIONS,
            callbacks=[EmulatedDevices(slowdowns)],
        )
    )
    size = ROWS * num_microbatches
    ids = torch.randint(CONFIG.vocab_size, (size * NUM_ITERATIONS, LENGTH))
    trainer.fit(module, DataLoader(TensorDataset(ids), batch_size=size))
    return statistics.median(module.seconds[4:])


def predicted_gain(slowdowns: tuple[float, ...], num_microbatches: int, schedule: str) -> float:
    """Return 1F1B's seconds over the solved order's, for backwards of two forwards."""

    def problem_of(weight_share: float) -> ScheduleProblem:
        return ScheduleProblem.equal(
            forward_s=slowdowns,
            input_s=[2 * slowdown * (1 - weight_share) for slowdown in slowdowns],
            weight_s=[2 * slowdown * weight_share for slowdown in slowdowns],
            num_microbatches=num_microbatches,
            most_held=[1.5 * len(slowdowns)] * len(slowdowns) if schedule == "deep" else (),
        )

    whole = problem_of(0.0)
    return end_s(whole, order_1f1b(whole)) / solve(problem_of(0.5)).end_s


def run(repeats: int = REPEATS) -> list[Row]:
    """Time each schedule and 1F1B in turns."""
    rows = []
    pool = ProcessPool()
    try:
        for name, slowdowns, target in (("1:1:2:2", UNEQUAL, 1.1), ("equal", EQUAL, 1.0)):
            for schedule in ("split", "deep"):
                count = 2 * len(slowdowns)
                pairs = [
                    [
                        max(pool.run(train, len(slowdowns), slowdowns, count, kind))
                        for kind in (schedule, "1f1b")
                    ]
                    for _ in range(repeats)
                ]
                ours, usual = (statistics.median(column) for column in zip(*pairs, strict=True))
                predicted = predicted_gain(slowdowns, count, schedule)
                rows.append(
                    Row(
                        name=f"iteration, 4 emulated stages, {name}, {schedule}",
                        ours=ours,
                        peer=usual,
                        unit="s",
                        target=target,
                        better="higher",
                        kind="measured",
                        value=statistics.median(b / a for a, b in pairs),
                        note=f"own 1F1B, {count} micro-batches; predicted {predicted:.2f}",
                    )
                )
    finally:
        pool.close()
    return rows
