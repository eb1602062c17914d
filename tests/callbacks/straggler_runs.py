"""Runs with injected faults in virtual time, and what a monitor made of them."""

import re
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from examples.slow_parts import Fault, InjectFaults
from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.callbacks import StragglerMonitor, straggler_monitor
from lightning_hetero.core.plan import PipelinePlan
from lightning_hetero.straggler import Event, PolicyConfig, read_events
from lightning_hetero.testing import EmulatedDevices
from tests.callbacks.virtual_time import VirtualTime
from tests.toy import ToyModule, ToyOptions, loader, quiet

WORLD_SIZE = 4


@dataclass(frozen=True, kw_only=True)
class Drill:
    """A run to watch."""

    faults: tuple[Fault, ...] = ()
    num_layers: int = 1
    """More than a stage needs would take no longer in virtual time."""
    num_stages: int = 1
    cuts: tuple[int, ...] = ()
    """Layers of the stages; none cuts them evenly."""
    num_microbatches: int = 8
    num_steps: int = 48
    strategy: str = "hetero"
    world_size: int = WORLD_SIZE
    batch_size: int = 8
    is_watched: bool = True
    dry_run: bool = False
    replaces_given_plan: bool = False
    policy: PolicyConfig = field(
        default_factory=lambda: PolicyConfig(rebalance_cost_s=0.05, swap_cost_s=0.2)
    )

    @property
    def num_pipelines(self) -> int:
        return self.world_size // self.num_stages

    def on_single_device(self) -> "Drill":
        """The same run on one device, with all pipelines' batches in one, and nobody watching."""
        return replace(
            self,
            faults=(),
            strategy="auto",
            world_size=1,
            num_stages=1,
            batch_size=self.batch_size * self.num_pipelines,
            is_watched=False,
        )


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What came of it, on one rank."""

    losses: list[float]
    iteration_s: list[float]
    plans: list[tuple[tuple[tuple[int, ...], int | None], ...]]
    """For each step (ranks, micro-batches) of every pipeline."""
    layers: list[list[int]]
    """For each step the layers of the first pipeline's stages."""
    said: list[str]
    events: tuple[Event, ...]


class Notes(L.Callback):
    """Notes what each step took and under which plan it ran."""

    def __init__(self, time: VirtualTime) -> None:
        self.time = time
        self.iteration_s: list[float] = []
        self.plans: list[Any] = []
        self.layers: list[list[int]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.start_s = self.time.wall_s

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.iteration_s.append(self.time.wall_s - self.start_s)
        if isinstance(trainer.strategy, HeteroStrategy):
            pipelines = trainer.strategy.plan.pipelines
            self.plans.append(tuple((p.ranks, p.num_microbatches) for p in pipelines))
            self.layers.append([len(stage.layers) for stage in pipelines[0].stages])


class Timed(ToyModule):
    """A module whose step takes time also where no clock stretches it."""

    time: VirtualTime

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not isinstance(self.trainer.strategy, HeteroStrategy):
            self.time.compute()
        return super().training_step(batch, batch_idx)


def run(rank: int, drill: Drill, folder: str) -> Seen:
    torch.manual_seed(0)
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(straggler_monitor, "rank_zero_info", said.append)
        time = VirtualTime(patch, seed=rank)
        time.num_layers = drill.num_layers if drill.cuts else 0
        notes = Notes(time)
        callbacks: list[L.Callback] = [time, notes, InjectFaults(drill.faults)]
        if drill.strategy == "hetero":
            callbacks.append(EmulatedDevices((8.0,) * drill.world_size))
        if drill.is_watched:
            names = "policy", "dry_run", "replaces_given_plan"
            options = {name: getattr(drill, name) for name in names}
            callbacks.append(StragglerMonitor(recheck_share=0.3, **options))
        trainer = L.Trainer(
            **quiet(devices=drill.world_size, strategy=strategy_of(drill), callbacks=callbacks),
            max_steps=drill.num_steps,
            default_root_dir=folder,
        )
        module = fit(trainer, drill, time)
    path = Path(folder) / "events.jsonl"
    return Seen(
        losses=module.losses,
        iteration_s=notes.iteration_s,
        plans=notes.plans,
        layers=notes.layers,
        said=said,
        events=read_events(path) if rank == 0 and path.exists() else (),
    )


def strategy_of(drill: Drill) -> Any:
    if drill.strategy != "hetero":
        return drill.strategy
    sizes = {"num_layers": drill.num_layers, "num_stages": drill.num_stages}
    plan = ParallelPlan.even(world_size=drill.world_size, **sizes)
    if drill.cuts:
        bounds = [*pairwise([0, *accumulate(drill.cuts)])]
        (pipeline,) = plan.pipelines
        cut = zip(pipeline.stages, bounds, strict=True)
        stages = tuple(replace(stage, layers=range(*layers)) for stage, layers in cut)
        plan = ParallelPlan(pipelines=(PipelinePlan(stages=stages),))
    return HeteroStrategy(plan=plan, num_microbatches=drill.num_microbatches)


def fit(trainer: L.Trainer, drill: Drill, time: VirtualTime) -> Timed:
    module = Timed(ToyOptions(num_layers=drill.num_layers))
    module.time = time
    num_rows = drill.batch_size * drill.num_pipelines * drill.num_steps
    trainer.fit(module, loader(num_rows, drill.batch_size))
    return module


def step_of(line: str) -> int:
    found = re.match(r"step (\d+):", line)
    assert found is not None, line
    return int(found[1])
