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


class Timer(L.Callback):
    """Times every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.start_s = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start_s)


def train(rank: int, case: Case, folder: str) -> tuple[list[float], list[float]]:
    """Return the seconds of each step, and those that the monitor took of each."""
    torch.manual_seed(0)
    even = ParallelPlan.even(world_size=4, num_layers=4, num_stages=case.num_stages)
    pipelines = zip(even.pipelines, case.num_microbatches, strict=True)
    plan = ParallelPlan(pipelines=tuple(replace(p, num_microbatches=n) for p, n in pipelines))
    monitor = TimedMonitor(events=Path(folder) / "events.jsonl")
    timer = Timer()
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
    pool = ProcessPool()
    try:
        rows = [*_rank_rows(pool, rank_case, best), *_link_rows(pool, link_case)]
    finally:
        pool.close()
    return rows


def _rank_rows(pool: ProcessPool, case: Case, best: Case) -> list[Row]:
    seconds, own_s, events = _watch(pool, case)
    best_s = statistics.median(_run(pool, best)[0][START:])
    after_s = _after(seconds, events, Mitigation.REBALANCE)
    step_s = statistics.median(seconds[2:START])
    share = statistics.median(own_s[:START]) / step_s
    named = "iterations until a slow rank was named", _named_after(events), 5
    mended = "iteration under S2, rank 3 of 4 slowed 1.9x, over the best", after_s / best_s, 1.10
    watched = "StragglerMonitor on rank 0, share of a step", share, 0.0039
    notes = (
        f"slow from step {START + 1} on",
        f"{after_s:.3f} s; the best plan from the start, under the same fault, {best_s:.3f} s",
        f"of {step_s:.3f} s",
    )
    return [
        replace(Row.of_share(*row, note), unit=unit, kind="measured")
        for row, note, unit in zip(
            (named, mended, watched), notes, ("iterations", "1", "1"), strict=True
        )
    ]


def _link_rows(pool: ProcessPool, case: Case) -> list[Row]:
    seconds, _, events = _watch(pool, case)
    left_s = statistics.median(_run(pool, replace(case, is_watched=False))[0][START:])
    after_s = _after(seconds, events, Mitigation.SWAP)
    row = Row.of_share(
        "speed under S3 over doing nothing, link 0-2 throttled to 20 kB/s",
        left_s / after_s,
        1.5,
        f"{after_s:.3f} s; named after {_named_after(events):g} iterations",
    )
    return [replace(row, unit="1", kind="measured", better="higher")]


def _run(pool: ProcessPool, case: Case) -> tuple[list[float], list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        seconds, own_s = pool.run(train, 4, case, folder)[0]
    return seconds, own_s


def _watch(pool: ProcessPool, case: Case) -> tuple[list[float], list[float], tuple[Any, ...]]:
    with tempfile.TemporaryDirectory() as folder:
        seconds, own_s = pool.run(train, 4, case, folder)[0]
        return seconds, own_s, read_events(Path(folder) / "events.jsonl")


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
