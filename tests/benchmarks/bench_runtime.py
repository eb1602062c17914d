"""Step time of the engine against DDP and against torch's own pipelines, on two gloo processes.

Counted, for P bytes of parameters and two ranks:

* two equal pipelines: DDP all-reduces gradients, P bytes out and in on each rank, and every rank
  updates all P. Here a rank pushes P/2 and pulls P/2 (the same bytes) and updates P/2.
* one pipeline of two stages: both send one hidden state and one gradient per micro-batch. Here
  weights are owned where they are held, so pull and push move nothing.

What is left is overhead: swapping weights into the module, agreeing on losses (one small
collective) and seeding: milliseconds a step and tenths of one an action. So each case is timed with
steps of a quarter of a second and of two seconds. Runs of ours and the peer's alternate, each of a
pair first in turn, because such machines change their speed from minute to minute: the ratio is the
median over pairs, each the ratio of the slower ranks' median steps. Steps of ours and of DDP's run
inside Lightning's loop, whose hooks take about a millisecond; torch's pipeline runs in a bare loop.
Notes give the same ratio of the main threads' CPU time.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_hetero import HeteroStrategy
from tests.benchmarks.harness import Row
from tests.benchmarks.steps import Seconds, StepTimes, processes
from tests.toy import VOCABULARY, Block, TokenRows, ToyModule, ToyOptions, quiet

OPTIONS = ToyOptions(num_layers=4, width=256)
ROWS = 128
"""Samples of 8 tokens a rank and step: 1,024 tokens, few for a real run."""
STEPS = 10
NUM_MICROBATCHES = 8
NUM_PAIRS = {256: 9, 768: 3}
"""Pairs of runs, by width of the model; each takes 8 seconds or 40."""


class PlainModule(ToyModule):
    """Without logging, which the peers' loops don't do either."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


def lightning_steps(
    strategy: Any, rows: int, callbacks: Sequence[L.Callback] = ()
) -> list[Seconds]:
    times = StepTimes()
    trainer = L.Trainer(
        strategy=strategy,
        callbacks=[times, *callbacks],
        **quiet(devices=2, max_steps=STEPS, barebones=False, limit_val_batches=0),
    )
    loader = DataLoader(TokenRows(rows * STEPS * 2), batch_size=rows)
    torch.manual_seed(0)
    trainer.fit(PlainModule(OPTIONS), loader)
    return times.steps


def medians(steps: list[Seconds]) -> Seconds:
    wall, cpu = (statistics.median(column) for column in zip(*steps, strict=True))
    return wall, cpu


Pair = tuple[Seconds, Seconds]
"""Median steps of a run of ours and of one of the peer's."""


def pairs_of(
    width: int, ours: Callable[[], list[Seconds]], peers: Callable[[], list[Seconds]]
) -> list[Pair]:
    """Time pairs of runs with a model of this width, each of a pair first in turn, ours at first.

    Torch's pipelines use the process group that Lightning makes.
    """
    global OPTIONS
    OPTIONS = replace(OPTIONS, width=width)
    pairs: list[Pair] = []
    for index in range(NUM_PAIRS[width]):
        runs = [ours, peers]
        times = {run: medians(run()) for run in (runs[::-1] if index % 2 else runs)}
        pairs.append((times[ours], times[peers]))
    return pairs


def against_ddp(rank: int, width: int) -> list[Pair]:
    return pairs_of(
        width,
        lambda: lightning_steps(HeteroStrategy(num_microbatches=1), ROWS),
        lambda: lightning_steps(DDPStrategy(), ROWS),
    )


class FirstStage(nn.Module):
    def __init__(self, module: ToyModule) -> None:
        super().__init__()
        self.model = module.model
        self.blocks = nn.ModuleList(list(module.model.blocks)[:2])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.wte(ids) + self.model.wpe[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x


class LastStage(nn.Module):
    def __init__(self, module: ToyModule) -> None:
        super().__init__()
        self.blocks: nn.ModuleList | list[Block] = nn.ModuleList(list(module.model.blocks)[2:])
        self.ln_f = module.model.ln_f
        self.head = module.model.head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def torch_pipeline_steps(rank: int) -> list[Seconds]:
    """Time steps of torch.distributed.pipelining with the same AdamW groups on its own stage."""
    torch.manual_seed(0)
    module = PlainModule(OPTIONS)
    stage_module = FirstStage(module) if rank == 0 else LastStage(module)
    used = {id(p) for p in stage_module.parameters()}
    if rank == 0:
        used -= {id(p) for p in (*module.model.ln_f.parameters(), module.model.head.weight)}
        used -= {id(p) for block in list(module.model.blocks)[2:] for p in block.parameters()}
    parameters = [p for p in module.parameters() if id(p) in used]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    stage = PipelineStage(stage_module, rank, 2, torch.device("cpu"))

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))

    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=loss_fn)
    watch = StepTimes()
    for ids, labels in DataLoader(TokenRows(ROWS * STEPS), batch_size=ROWS):
        watch.start()
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=labels, losses=losses)
        optimizer.step()
        watch.stop()
    return watch.steps


def against_torch_pipelining(rank: int, width: int) -> list[Pair]:
    def ours() -> list[Seconds]:
        strategy = HeteroStrategy(num_stages=2, num_microbatches=NUM_MICROBATCHES)
        steps = lightning_steps(strategy, ROWS)
        dist.barrier()
        return steps

    return pairs_of(width, ours, lambda: torch_pipeline_steps(rank))


def slowest(ranks: list[Seconds]) -> Seconds:
    wall, cpu = (max(column) for column in zip(*ranks, strict=True))
    return wall, cpu


def run() -> list[Row]:
    rows = []
    cases = (
        ("step, two equal pipelines", against_ddp, 1.02, "Lightning DDPStrategy"),
        ("step, one pipeline of two stages", against_torch_pipelining, 1.0, "torch 1F1B"),
    )
    for width, (name, function, target, peer_name) in product(NUM_PAIRS, cases):
        with processes() as pool:
            by_rank = pool.run(function, 2, width, timeout_s=900)
        pairs = [
            [slowest(list(item)) for item in zip(*pair, strict=True)]
            for pair in zip(*by_rank, strict=True)
        ]
        walls = sorted(ours[0] / peer[0] for ours, peer in pairs)
        cpu = statistics.median(ours[1] / peer[1] for ours, peer in pairs)
        rows.append(
            Row(
                name=f"{name}, width {width}",
                ours=statistics.median(ours[0] for ours, _ in pairs),
                peer=statistics.median(peer[0] for _, peer in pairs),
                target=target,
                value=statistics.median(walls),
                note=f"{peer_name}; {len(pairs)} pairs, {walls[0]:.2f} to {walls[-1]:.2f}; "
                f"CPU time {cpu:.3f}",
            )
        )
    return rows
