"""Solved schedules against 1F1B and torch's: four stages whose passes and links take set times.

Each pass sleeps until it has taken its time, and messages between two nodes leave late, so four
stages run on two cores and what they compute hardly counts. Torch's schedules run stages of the
same seconds, two on each rank, and so do ours that are compared with them ("chunks"). What the
solver predicts of the same stages stands beside it.
"""

import math
import queue
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroStrategy
from lightning_hetero.core.actions import ActionKind
from lightning_hetero.runtime.clock import ComputeClock
from lightning_hetero.runtime.stage import activations
from lightning_hetero.schedules import (
    Edge,
    Schedule,
    ScheduleProblem,
    end_s,
    order_1f1b,
    solve_in_rooms,
)
from tests.benchmarks.harness import Row
from tests.benchmarks.steps import StepTimes, processes
from tests.processes import ProcessPool
from tests.toy import quiet

UNIT_S = 0.02
"""Seconds of the fastest stage's forward; a backward takes two, I and W one each."""
EQUAL = (1.0, 1.0, 1.0, 1.0)
UNEQUAL = (1.0, 1.0, 2.0, 2.0)
LATENCY = 1.5
"""Half of what a stage of `EQUAL` takes for a micro-batch, in units."""
WIDTH = 16
NUM_ITERATIONS = 7
NUM_WARM = 4
"""Iterations that aren't timed: schedules are solved after the third."""
UNITS = {
    ActionKind.FORWARD: 1.0,
    ActionKind.BACKWARD: 2.0,
    ActionKind.INPUT: 1.0,
    ActionKind.WEIGHT: 1.0,
}
CASES = (
    # Micro-batches for each stage, latency, chunks of a rank, and the target.
    ("two nodes", EQUAL, 4, LATENCY, 1, 1.3),
    ("1:1:2:2", UNEQUAL, 2, 0.0, 1, 1.1),
    ("equal", EQUAL, 2, 0.0, 1, 1.0),
    ("1:1:2:2, chunks", UNEQUAL, 2, 0.0, 2, 1.1),
    ("equal, chunks", EQUAL, 2, 0.0, 2, 1.0),
)
PEERS = ("ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")


class PacedClock(ComputeClock):
    """Lets each action take its seconds, waits apart."""

    def __init__(self, unit_s: float) -> None:
        super().__init__(torch.device("cpu"))
        self._unit_s = unit_s

    def before_send(self) -> None:
        if self._in_action and not self._depth:
            marks = self._marks
            waited_s = sum(end - start for start, end in marks.waits[marks.waits_before :])
            due = marks.action_start + waited_s + self._unit_s * UNITS[marks.action[0]]
            time.sleep(max(0.0, due - time.perf_counter()))


class LateSends:
    """Stands in for `dist.isend`: messages to other nodes leave a while later, in their order."""

    def __init__(self, latency_s: float, far: frozenset[int]) -> None:
        self._latency_s, self._far = latency_s, far
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._send_all, daemon=True).start()

    def isend(self, message: Tensor, peer: int, **options: Any) -> Any:
        if peer not in self._far:
            return dist.isend(message, peer, **options)
        sent = SimpleNamespace(event=threading.Event(), work=None)
        due = time.perf_counter() + self._latency_s
        self._queue.put((due, sent, message, peer, options))

        def wait() -> None:
            sent.event.wait()
            sent.work.wait()

        return SimpleNamespace(wait=wait)

    def _send_all(self) -> None:
        while True:
            due, sent, message, peer, options = self._queue.get()
            time.sleep(max(0.0, due - time.perf_counter()))
            sent.work = dist.isend(message, peer, **options)
            sent.event.set()


class Rows(L.LightningModule):
    """Layers so small that only their emulated seconds count."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (rows,) = batch
        return nn.functional.mse_loss(self.layers(rows), rows)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def workers_of(units: tuple[float, ...], num_chunks: int) -> tuple[int, ...]:
    """Return the rank of each stage: one stage on each, or two, there and back."""
    ranks = tuple(range(len(units)))
    return ranks if num_chunks == 1 else ranks + ranks[::-1]


def train(
    rank: int,
    units: tuple[float, ...],
    num_microbatches: int,
    schedule: str,
    latency: float,
    num_chunks: int,
) -> float:
    """Return the median seconds of an iteration; the middle link is between two nodes."""
    torch.manual_seed(1)
    workers, num_ranks = workers_of(units, num_chunks), len(units)
    module = Rows(len(workers))
    stages = [{"ranks": [r], "layers": [i, i + 1]} for i, r in enumerate(workers)]
    plan = {"pipelines": [{"stages": stages, "num_microbatches": num_microbatches}]}
    strategy = HeteroStrategy(plan, schedule=schedule)
    strategy.emulation = replace(
        strategy.emulation, make_clock=lambda _: PacedClock(UNIT_S * units[rank] / num_chunks)
    )
    middle = num_ranks // 2
    far = frozenset({middle} if rank == middle - 1 else {middle - 1} if rank == middle else ())
    sends = LateSends(latency * UNIT_S, far) if latency else dist
    late = SimpleNamespace(isend=sends.isend, irecv=dist.irecv)
    times = StepTimes(NUM_WARM)
    options = quiet(devices=num_ranks, max_steps=NUM_ITERATIONS, callbacks=[times])
    trainer = L.Trainer(**options, strategy=strategy)
    rows = torch.randn(num_microbatches * NUM_ITERATIONS, WIDTH)
    with mock.patch.object(activations, "dist", late):
        trainer.fit(module, DataLoader(TensorDataset(rows), batch_size=num_microbatches))
    return statistics.median(times.seconds)


class PacedStage(pipelining.PipelineStage):
    """A stage of torch's whose passes take their seconds."""

    unit_s = 0.0

    def _paced(self, run: Any, units: float, *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        found = run(*args, **options)
        time.sleep(max(0.0, start + units * self.unit_s - time.perf_counter()))
        return found

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        return self._paced(super().forward_one_chunk, 1.0, *args, **options)

    def backward_one_chunk(self, *args: Any, full_backward: Any = True, **options: Any) -> Any:
        units, run = 2.0 if full_backward else 1.0, super().backward_one_chunk
        return self._paced(run, units, *args, full_backward=full_backward, **options)

    def backward_weight_one_chunk(self, *args: Any, **options: Any) -> Any:
        return self._paced(super().backward_weight_one_chunk, 1.0, *args, **options)


def train_by_torch(rank: int, units: tuple[float, ...], num_microbatches: int, name: str) -> float:
    """Return the median seconds of an iteration under a schedule of torch's."""
    dist.init_process_group("gloo")
    num_ranks = len(units)
    is_v = name != "ScheduleInterleaved1F1B"
    second = 2 * num_ranks - 1 - rank if is_v else rank + num_ranks
    stages = []
    for index in (rank, second):
        stage = PacedStage(nn.Linear(WIDTH, WIDTH), index, 2 * num_ranks, torch.device("cpu"))
        stage.unit_s = UNIT_S * units[rank] / 2
        stages.append(stage)
    schedule = getattr(pipelining.schedules, name)(
        stages, num_microbatches, loss_fn=nn.functional.mse_loss
    )
    rows, times = torch.randn(num_microbatches, WIDTH), StepTimes()
    for _ in range(NUM_ITERATIONS - 2):
        dist.barrier()
        times.start()
        given = {"target": rows} if any(stage.is_last for stage in stages) else {}
        schedule.step(*([rows] if rank == 0 else []), **given)
        dist.barrier()
        times.stop()
    dist.destroy_process_group()
    return statistics.median(times.seconds)


def predicted_gain(
    units: tuple[float, ...],
    num_microbatches: int,
    schedule: str,
    latency: float,
    num_chunks: int,
) -> float:
    """Return the seconds of 1F1B with one stage on each rank over the solved order's."""
    num_ranks = len(units)

    def problem_of(
        chunks: int, weight_share: float, most_held: Sequence[float] = ()
    ) -> ScheduleProblem:
        workers = workers_of(units, chunks)
        edges = [Edge() for _ in workers[1:]]
        edges[num_ranks // 2 - 1] = Edge(latency_s=latency)
        own = [units[worker] / chunks for worker in workers]
        return ScheduleProblem.equal(
            forward_s=own,
            input_s=[2 * unit * (1 - weight_share) for unit in own],
            weight_s=[2 * unit * weight_share for unit in own],
            num_microbatches=num_microbatches,
            most_held=most_held,
            edges=edges,
            workers=workers,
        )

    whole = problem_of(1, 0.0)
    rooms = Schedule(schedule).rooms([math.inf] * num_ranks, whole.workers * num_chunks)
    found = solve_in_rooms(problem_of(num_chunks, 0.5, most_held) for most_held in rooms)
    return end_s(whole, order_1f1b(whole)) / found.end_s


def run(only: str = "") -> list[Row]:
    """Time each schedule and its peers in turn; `only` names a case."""
    rows = []
    for case in CASES:
        if only in case[0]:
            with processes() as pool:
                rows += _case(pool, *case)
    return rows


def _case(
    pool: ProcessPool,
    name: str,
    units: tuple[float, ...],
    per_stage: int,
    latency: float,
    chunks: int,
    target: float,
) -> list[Row]:
    count = per_stage * len(units)
    common = len(units), units, count
    usual = max(pool.run(train, *common, "1f1b", latency, 1))
    deep = max(pool.run(train, *common, "deep", latency, chunks))
    predicted = predicted_gain(units, count, "deep", latency, chunks)
    title, higher = f"4 emulated ranks, {name}", {"ours": deep, "better": "higher"}
    note = f"own 1F1B, {count} micro-batches"
    gain = f"gain, predicted against measured, {title}"
    off = abs(predicted - usual / deep)
    rows = [
        Row(name=f"iteration, {title}", peer=usual, target=target, note=note, **higher),
        Row(name=gain, ours=predicted, peer=usual / deep, unit="x", target=0.05, value=off),
    ]
    if chunks > 1:
        peers = {name: max(pool.run(train_by_torch, *common, name)) for name in PEERS}
        rows.append(
            Row(
                name=f"iteration, {title}, against torch",
                peer=min(peers.values()),
                target=1.05 if units is UNEQUAL else 1.0,
                note=", ".join(f"{key} {value:.3f} s" for key, value in peers.items()),
                **higher,
            )
        )
    return rows
