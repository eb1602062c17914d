"""Slow a rank, then a link, of real runs of four processes, and time what the monitor makes of it.

Devices are emulated by sleeping, so two cores play four of them. Floors: with a rank at 1/1.9 the
fastest split of 32 micro-batches over four pipelines has 9 in the longest, 9/8 of the time without
a fault; a throttled link that carries no message costs nothing. Best possible is a run that has the
best plan from its first step, under the same fault; the peer of S3 is the run left as it is.
"""

import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch

from examples.slow_parts import Fault, InjectFaults, SlowLink, SlowRank
from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.callbacks import StragglerMonitor
from lightning_hetero.straggler import ActionEvent, DecisionKind, Finding, Mitigation, read_events
from lightning_hetero.testing import EmulatedDevices
from tests.benchmarks.harness import Row
from tests.benchmarks.steps import StepTimes, processes
from tests.processes import ProcessPool
from tests.toy import ToyModule, ToyOptions, loader, quiet

SLOWDOWN = 40.0
START = 12
NUM_STEPS = 40
SAMPLES = 8
SLOW_RANK = SlowRank(start=START, global_rank=3, slowdown=1.9)
SLOW_LINK = SlowLink(start=START, ranks=(0, 2), bytes_per_s=2e4)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    fault: Fault
    num_stages: int = 1
    num_microbatches: tuple[int, ...] = (8, 8, 8, 8)
    is_watched: bool = True


class TimedMonitor(StragglerMonitor):
    """Notes how long its own hooks keep the processor in a step.

    Waiting for slower ranks is left out: without the monitor the next step would wait for them.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seconds: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        start_s = time.thread_time()
        super().on_train_batch_start(*args)
        self.seconds.append(time.thread_time() - start_s)

    def on_train_batch_end(self, *args: Any) -> None:
        start_s = time.thread_time()
        super().on_train_batch_end(*args)
        self.seconds[-1] += time.thread_time() - start_s


def train(rank: int, case: Case, folder: str) -> tuple[list[float], list[float]]:
    """Return the seconds of each step, and those that the monitor took of each."""
    torch.manual_seed(0)
    even = ParallelPlan.even(world_size=4, num_layers=4, num_stages=case.num_stages)
    pipelines = zip(even.pipelines, case.num_microbatches, strict=True)
    plan = ParallelPlan(pipelines=tuple(replace(p, num_microbatches=n) for p, n in pipelines))
    monitor = TimedMonitor(events=Path(folder) / "events.jsonl")
    timer = StepTimes(warm_up=0)
    callbacks = [timer, EmulatedDevices((SLOWDOWN,) * 4), InjectFaults([case.fault])]
    callbacks += [monitor] if case.is_watched else []
    trainer = L.Trainer(
        **quiet(devices=4, strategy=HeteroStrategy(plan), max_steps=NUM_STEPS, callbacks=callbacks)
    )
    trainer.fit(ToyModule(ToyOptions(num_layers=4)), loader(SAMPLES * 4 * NUM_STEPS, SAMPLES))
    return timer.seconds, monitor.seconds


def run() -> list[Row]:
    """Run both faults with the monitor, without it, and under the best plan."""
    rank_case = Case(fault=SLOW_RANK)
    link_case = Case(fault=SLOW_LINK, num_stages=2, num_microbatches=(4, 4))
    best = replace(rank_case, num_microbatches=(9, 9, 9, 5), is_watched=False)
    with processes() as pool:
        seconds, own_s, events = _run(pool, rank_case)
        link_s, _, link_events = _run(pool, link_case)
        best_s, left_s = (
            statistics.median(_run(pool, case)[0][START:])
            for case in (best, replace(link_case, is_watched=False))
        )
    after_s = _after(seconds, events, Mitigation.REBALANCE)
    swapped_s = _after(link_s, link_events, Mitigation.SWAP)
    step_s = statistics.median(seconds[2:START])
    return [
        Row(
            name="iterations until a slow rank was named",
            ours=_named_after(events),
            unit="iterations",
            target=5,
            note=f"slow from step {START + 1} on",
        ),
        Row(
            name="iteration under S2, rank 3 of 4 slowed 1.9x, over the best",
            ours=after_s,
            peer=best_s,
            target=1.10,
            note="the best plan from the start, under the same fault",
        ),
        Row(
            name="StragglerMonitor on rank 0, share of a step",
            ours=statistics.median(own_s[:START]),
            peer=step_s,
            target=0.0039,
        ),
        Row(
            name="iteration under S3, link 0-2 throttled to 20 kB/s, over doing nothing",
            ours=swapped_s,
            peer=left_s,
            target=1.5,
            better="higher",
            note=f"named after {_named_after(link_events):g} iterations",
        ),
    ]


def _run(pool: ProcessPool, case: Case) -> tuple[list[float], list[float], tuple[Any, ...]]:
    """Return the seconds of steps, those of the monitor in each, and what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        seconds, own_s = pool.run(train, 4, case, folder)[0]
        path = Path(folder) / "events.jsonl"
        return seconds, own_s, read_events(path) if case.is_watched else ()


def _after(seconds: list[float], events: tuple[Any, ...], step: Mitigation) -> float:
    """Return the median step once a mitigation was in force; NaN if it never was."""
    done = [
        event.step
        for event in events
        if isinstance(event, ActionEvent)
        and event.kind is DecisionKind.APPLY
        and event.mitigation is step
    ]
    return statistics.median(seconds[done[0] :]) if done else float("nan")


def _named_after(events: tuple[Any, ...]) -> float:
    """Return the slow iterations until the first finding."""
    found = [event.step for event in events if isinstance(event, Finding)]
    return float(found[0] - START) if found else float("inf")
