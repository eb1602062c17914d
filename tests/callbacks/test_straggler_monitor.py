"""Faults are injected into real runs of four processes; the monitor must find and mend them.

The runs live in virtual time, which no machine's noise changes. Under a data module the monitor is
tested in `tests.examples.test_long_run`.
"""

import re
import statistics
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from examples.slow_parts import Fault, InjectFaults, SlowLink, SlowRank
from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.callbacks import StragglerMonitor, straggler_monitor
from lightning_hetero.core.plan import PipelinePlan
from lightning_hetero.straggler import (
    ActionEvent,
    DecisionKind,
    Event,
    Finding,
    FindingKind,
    Mitigation,
    PolicyConfig,
    read_events,
)
from lightning_hetero.testing import EmulatedDevices
from tests.callbacks.virtual_time import VirtualTime
from tests.toy import ToyModule, ToyOptions, loader, quiet

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore")]

START, DURATION = 14, 18
SLOW_RANK = SlowRank(start=START, duration=DURATION, global_rank=3, slowdown=1.9)
SLOW_LINK = SlowLink(start=START, duration=DURATION, ranks=(0, 2), bytes_per_s=1e5)
BATCH = 8


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
    world_size: int = 4
    batch_size: int = BATCH
    is_watched: bool = True

    @property
    def num_rows(self) -> int:
        return self.batch_size * self.world_size // self.num_stages * self.num_steps

    @property
    def plan(self) -> ParallelPlan:
        sizes = {"num_layers": self.num_layers, "num_stages": self.num_stages}
        plan = ParallelPlan.even(world_size=self.world_size, **sizes)
        if not self.cuts:
            return plan
        (pipeline,), bounds = plan.pipelines, pairwise([0, *accumulate(self.cuts)])
        cut = zip(pipeline.stages, bounds, strict=True)
        stages = tuple(replace(stage, layers=range(*layers)) for stage, layers in cut)
        return ParallelPlan(pipelines=(PipelinePlan(stages=stages),))


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What came of it, on one rank."""

    losses: list[float]
    iteration_s: list[float]
    plans: list[ParallelPlan]
    """For each step."""
    said: list[str]
    events: tuple[Event, ...]

    def found(self) -> list[tuple[FindingKind, tuple[int, ...], int]]:
        return [(e.kind, e.ranks, e.step) for e in self.events if isinstance(e, Finding)]

    def actions(self) -> list[tuple[str, Mitigation]]:
        done = [event for event in self.events if isinstance(event, ActionEvent)]
        return [(e.kind.value, e.mitigation) for e in done if e.kind is not DecisionKind.KEEP]

    def middle_s(self, first: int, last: int) -> float:
        return statistics.median(self.iteration_s[first:last])


class Notes(L.Callback):
    """Notes what each step took and under which plan it ran."""

    def __init__(self, time: VirtualTime) -> None:
        self.time, self.iteration_s, self.plans = time, [], []

    def on_train_batch_start(self, *_: Any) -> None:
        self.start_s = self.time.wall_s

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.iteration_s.append(self.time.wall_s - self.start_s)
        self.plans.append(getattr(trainer.strategy, "plan", None))


class Timed(ToyModule):
    """A module whose step takes time also where no clock stretches it."""

    time: VirtualTime

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
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
        notes, strategy = Notes(time), drill.strategy
        callbacks: list[L.Callback] = [time, notes]
        if strategy == "hetero":
            callbacks.append(InjectFaults(drill.faults))
            strategy = HeteroStrategy(plan=drill.plan, num_microbatches=drill.num_microbatches)
            callbacks.append(EmulatedDevices((8.0,) * drill.world_size))
        if drill.is_watched:
            policy = PolicyConfig(rebalance_cost_s=0.05, swap_cost_s=0.2)
            options = {"policy": policy, "replaces_given_plan": bool(drill.cuts)}
            callbacks.append(StragglerMonitor(recheck_share=0.3, **options))
        trainer = L.Trainer(
            **quiet(devices=drill.world_size, strategy=strategy, callbacks=callbacks),
            max_steps=drill.num_steps,
            default_root_dir=folder,
        )
        module = Timed(ToyOptions(num_layers=drill.num_layers))
        module.time = time
        trainer.fit(module, loader(drill.num_rows, drill.batch_size))
    path = Path(folder) / "events.jsonl"
    return Seen(
        losses=module.losses,
        iteration_s=notes.iteration_s,
        plans=notes.plans,
        said=said,
        events=read_events(path) if rank == 0 and path.exists() else (),
    )


def watch(pool, drill: Drill, folder: Path) -> Seen:
    seen = pool.run(run, drill.world_size, drill, str(folder))[0]
    if drill.strategy == "hetero":
        # One device that trains all pipelines' batches learns the same.
        batch_size = BATCH * drill.world_size // drill.num_stages
        alone = {"faults": (), "strategy": "auto", "world_size": 1, "num_stages": 1, "cuts": ()}
        alone = replace(drill, batch_size=batch_size, is_watched=False, **alone)
        (expected,) = pool.run(run, 1, alone, str(folder / "single"))
        assert seen.losses == pytest.approx(expected.losses, rel=1e-5)
    return seen


@pytest.mark.slow
def test_a_throttled_link_is_named_and_relieved_until_it_recovers(pool, tmp_path):
    drill = Drill(faults=(SLOW_LINK,), num_layers=2, num_stages=2, num_microbatches=4)
    seen = watch(pool, drill, tmp_path)
    ((kind, ranks, step),) = seen.found()
    assert (kind, ranks) == (FindingKind.LINK, (0, 2))
    assert step <= START + 5
    assert seen.actions() == [("apply", Mitigation.SWAP), ("undo", Mitigation.SWAP)]
    slow_s = seen.middle_s(START, step)
    assert slow_s >= 1.2 * seen.middle_s(START + DURATION - 8, START + DURATION)
    assert seen.plans[-1] == seen.plans[0]


def test_a_slow_rank_is_named_and_relieved_until_it_recovers(pool, tmp_path):
    seen = watch(pool, Drill(faults=(SLOW_RANK,)), tmp_path)
    ((kind, ranks, step),) = seen.found()
    assert (kind, ranks) == (FindingKind.DEVICE, (3,))
    assert step <= START + 5
    assert seen.actions() == [("apply", Mitigation.REBALANCE), ("undo", Mitigation.REBALANCE)]
    # 32 micro-batches on speeds 1, 1, 1 and 1/1.9: no split is faster than 9 of them.
    most_s = 1.15 * seen.middle_s(0, START) * (9.5 / 8)
    assert seen.middle_s(START + DURATION - 8, START + DURATION) <= most_s
    assert seen.plans[-1] == seen.plans[0]
    named, moved, undone = seen.said
    assert re.match(rf"step {step}: ", named)
    assert "pipeline 3 slowed 1.9× (since step 15): rank 3 computes 1.9× slower" in moved
    assert "S2 moved 3 of 32 micro-batches away, iteration 0." in moved
    assert "S2 was undone" in undone


def test_badly_cut_stages_are_cut_anew_and_then_again_around_a_slow_rank(pool, tmp_path):
    slow = SlowRank(start=50, duration=16, global_rank=0, slowdown=3.0)
    cut = {"num_layers": 6, "num_stages": 2, "cuts": (5, 1), "world_size": 2, "num_microbatches": 4}
    seen = watch(pool, Drill(faults=(slow,), num_steps=84, **cut), tmp_path)
    layers = ([len(stage.layers) for stage in plan.pipelines[0].stages] for plan in seen.plans)
    assert [cut for cut, _ in groupby(layers)] == [[5, 1], [3, 3], [1, 5], [3, 3]]
    steps = [("apply", Mitigation.REPLAN)] * 2
    assert seen.actions() == [*steps, ("undo", Mitigation.REPLAN)]
    assert seen.middle_s(40, 48) <= 0.75 * seen.middle_s(4, 30)
    assert "S2b cut stages to 3+3 layers instead of 5+1" in seen.said[0]
