"""Runs that change their plan after every iteration, and what is left of the plans before."""

import ctypes
import gc
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from resource import getpagesize
from statistics import median
from typing import Any
from unittest import mock

import lightning as L
import torch

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.runtime.iteration.running_plan import PlanSwitch
from tests.runtime.runs import Case, pipeline, plan_of, stage, train
from tests.toy import ToyModule, ToyOptions, loader, quiet

OPTIONS = ToyOptions(num_layers=4, width=64, optimizer="sgd")
"""0.8 MB of weights: what one change in a hundred leaves behind is seen in a process's memory."""


def two_stages(first: int, second: int, cut: int, count: int) -> dict[str, Any]:
    return plan_of(pipeline(stage(first, 0, cut), stage(second, cut, 4), num_microbatches=count))


def two_pipelines(first: int, second: int) -> dict[str, Any]:
    return plan_of(
        pipeline(stage(0, 0, 4), num_microbatches=first),
        pipeline(stage(1, 0, 4), num_microbatches=second),
    )


PLANS = [
    *(two_stages(0, 1, cut, 2) for cut in (1, 2, 3)),
    two_pipelines(1, 1),
    *(two_stages(1, 0, cut, 1) for cut in (1, 2)),
    two_pipelines(2, 1),
    plan_of(pipeline(stage(1, 0, 4), num_microbatches=2)),
]


@dataclass
class Left:
    """What a run of many changes has left on one rank."""

    num_changes: int = 0
    most_alive: int = 0
    """Shards and gradients of earlier plans, at most, that were there after an iteration."""
    alive_behind: int = 0
    """Shards and gradients of all plans that were there behind the run."""
    resident_mb: list[float] = field(default_factory=list)
    """Memory of the process, every so many changes."""

    @property
    def grown_mb(self) -> float:
        """By how much the process has grown from the first look to the last, but for noise.

        Twice what lies between the medians of the first half of the looks and of the second one: a
        look finds up to 1 MB more or less.
        """
        half = len(self.resident_mb) // 2
        return 2 * (median(self.resident_mb[half:]) - median(self.resident_mb[:half]))


class ChangesPlan(L.Callback):
    """Asks for another plan after every iteration, and freezes or thaws a parameter now and then.

    What is alive is looked at in training only, also behind a validation.

    Args:
        look_every: Iterations between two looks at the process's memory.
        freeze_every: Iterations between a change of what is frozen; 0 for never.
    """

    def __init__(self, *, look_every: int, freeze_every: int) -> None:
        self.left = Left()
        self.tensors: list[weakref.ref[torch.Tensor]] = []
        self._plans = [ParallelPlan.from_dict(plan) for plan in PLANS]
        self._look_every = look_every
        self._freeze_every = freeze_every

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        assert isinstance(trainer.strategy, HeteroStrategy)
        shards = list(trainer.strategy.engine.plans.running.weights.shards.values())
        held = [*shards, *(shard.grad for shard in shards if shard.grad is not None)]
        alive = [tensor for item in self.tensors if (tensor := item()) is not None]
        known = {id(tensor) for tensor in held}
        self.left.most_alive = max(
            self.left.most_alive, sum(id(tensor) not in known for tensor in alive)
        )
        self.tensors = [weakref.ref(tensor) for tensor in held]
        self.left.num_changes += 1
        step = trainer.global_step
        trainer.strategy.change_plan(self._plans[step % len(PLANS)])
        if self._freeze_every and step % self._freeze_every == 0:
            module.model.ln_f.requires_grad_(step // self._freeze_every % 2 == 0)
        if step % self._look_every == 0:
            gc.collect()
            self.left.resident_mb.append(resident_mb())


def resident_mb() -> float:
    ctypes.CDLL(None).malloc_trim(0)  # What is free in the allocator isn't held by anybody.
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * getpagesize() / 2**20


def change_often(
    rank: int,
    num_changes: int,
    freeze_every: int,
    exchange: str = "messages",
    look_every: int = 100,
) -> Left:
    """Change the plan after every iteration."""
    torch.manual_seed(0)
    changes = ChangesPlan(look_every=look_every, freeze_every=freeze_every)
    trainer = L.Trainer(
        strategy=HeteroStrategy(plan=ParallelPlan.from_dict(PLANS[0]), exchange=exchange),  # type: ignore[arg-type]
        callbacks=[changes],
        **quiet(devices=2, max_steps=num_changes, val_check_interval=min(num_changes, 7)),
        limit_val_batches=1 if freeze_every else 0,
    )
    module = ToyModule(OPTIONS)
    # A cycle would be there until Python looks for it, and one through torch for ever.
    gc.disable()
    try:
        trainer.fit(module, loader(8 * num_changes, 4), loader(8, 4, seed=1))
    finally:
        gc.enable()
    gc.collect()
    changes.left.alive_behind = sum(item() is not None for item in changes.tensors)
    return changes.left


def count_plans_at_once(rank: int) -> list[int]:
    """Return how many plans were alive whenever an iteration made another one ready."""
    made: list[weakref.ref[object]] = []
    alive: list[int] = []
    make_ready = PlanSwitch._make_ready

    def make(self: PlanSwitch, plan: ParallelPlan, *, shares_memory: bool) -> Any:
        alive.append(sum(item() is not None for item in made))
        running = make_ready(self, plan, shares_memory=shares_memory)
        made.extend([weakref.ref(running), weakref.ref(running.weights)])
        return running

    with mock.patch.object(PlanSwitch, "_make_ready", make):
        plan = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 2), stage(2, 2, 3)))
        train(rank, Case(plan=plan, world_size=3))
    return alive
