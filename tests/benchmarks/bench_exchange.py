"""Pull and push against FSDP2's all-gather and reduce-scatter, and what a change of plan costs.

Counted, for P bytes of parameters on n ranks that all hold all layers: a pull moves P·(n-1)/n into
and out of each rank, as an all-gather does, and a push as much, as a reduce-scatter does. FSDP2
copies each gathered layer once out of the collective's buffer; here each received piece is copied
once into the compute weights. The layers compute next to nothing (a sum of each weight), so that a
step is its exchange.

A change of plan moves one stage's weights from elsewhere, once, and makes new tables.

`--only push` leaves that out.
"""

import statistics
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_hetero import HeteroStrategy, ParallelPlan
from tests.benchmarks.harness import Row
from tests.benchmarks.steps import StepTimes, processes
from tests.plans import pipeline, plan_of, stage
from tests.toy import TokenRows, ToyModule, ToyOptions, quiet

NUM_LAYERS = 6
WIDTH = 768
STEPS = 14
REPEATS = 4
CHANGE_OPTIONS = ToyOptions(num_layers=4, width=256)


class WeightSums(nn.Module):
    """A layer that uses all its weights and computes next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.down = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-9 * (self.up.sum() + self.down.sum())


class SumModule(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([WeightSums() for _ in range(NUM_LAYERS)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].float()
        for layer in self.layers:
            x = layer(x)
        return x.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Alternating(StepTimes):
    """Times each step from a barrier on; may change the plan before a step."""

    def __init__(self, plans: list[ParallelPlan] | None = None) -> None:
        super().__init__()
        self._plans = plans

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        dist.barrier()
        self.start()
        if self._plans:
            assert isinstance(trainer.strategy, HeteroStrategy)
            trainer.strategy.change_plan(self._plans[trainer.global_step % len(self._plans)])


def our_steps() -> list[float]:
    times = Alternating()
    trainer = L.Trainer(
        strategy=HeteroStrategy(),
        callbacks=[times],
        **quiet(devices=2, max_steps=STEPS),
    )
    rows = TokenRows(4 * STEPS)
    trainer.fit(SumModule(), DataLoader(rows, batch_size=2))
    return times.seconds


def fsdp_steps() -> list[float]:
    module = SumModule()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in module.layers:
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)
    watch = StepTimes()
    for batch in DataLoader(TokenRows(2 * STEPS), batch_size=2):
        dist.barrier()
        watch.start()
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        optimizer.step()
        watch.stop()
    return watch.seconds


def exchange(rank: int) -> tuple[float, float]:
    """Return (ours, FSDP2's) median step time in seconds on this rank."""
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(REPEATS):
        ours += our_steps()
        theirs += fsdp_steps()
    return statistics.median(ours), statistics.median(theirs)


def change_of_plan(rank: int) -> tuple[float, float]:
    """Return median step times (with a change of plan before each, without one)."""
    cuts = (plan_of(pipeline(stage(0, 0, cut), stage(1, cut, 4))) for cut in (2, 1))
    plans = [ParallelPlan.from_dict(plan) for plan in cuts]
    figures: list[list[float]] = [[], []]
    for _ in range(REPEATS):
        # Both alternate between the same plans' compute: each plan stays for a whole run here.
        for index, changes in enumerate((plans, None, None)):
            times = Alternating(changes)
            plan = plans[0] if index < 2 else plans[1]
            trainer = L.Trainer(
                strategy=HeteroStrategy(plan=plan, num_microbatches=4),
                callbacks=[times],
                **quiet(devices=2, max_steps=STEPS, limit_val_batches=0),
            )
            torch.manual_seed(0)
            data = DataLoader(TokenRows(64 * STEPS), batch_size=64)
            trainer.fit(ToyModule(CHANGE_OPTIONS), data)
            figures[min(index, 1)] += times.seconds
    return statistics.median(figures[0]), statistics.median(figures[1])


def run(only: str = "") -> list[Row]:
    fsdp = "FSDP2 all-gather and reduce-scatter"
    cases = (
        ("push and pull of 28 MB", exchange, 0.6, fsdp),
        ("step with a change of plan", change_of_plan, 1.2, "the same step without"),
    )
    rows = []
    for name, function, target, peer_name in cases:
        if only in name:
            with processes() as pool:
                figures = pool.run(function, 2, timeout_s=500)
            ours, peer = (max(item[index] for item in figures) for index in range(2))
            rows.append(Row(name=name, ours=ours, peer=peer, target=target, note=peer_name))
    return rows
