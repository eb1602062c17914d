"""What the engine itself costs: layers that compute next to nothing, on two gloo processes.

* Two equal pipelines against DDP: seconds of an iteration over DDP's. Both run in Lightning's loop.
* One pipeline of two stages against a bare loop of the same 1F1B actions on the same stages: a
  receive, a forward or a backward, a send, and nothing that looks at anything. The figure is what
  one more action costs, from iterations of few and of many micro-batches, so that what is paid once
  an iteration doesn't count.
* The check of how losses count, in two stages of two micro-batches, against a training step beside
  it, of a small model and one of width 512: CPU seconds, and the most memory that either adds to
  the process.

Each figure of the first two is given twice: in CPU seconds of the main thread, for what Python adds
is computed there and others who use the machine don't disturb it; and in wall time, which is what a
user waits for. An action of ours costs more CPU than the bare loop's, but its receive is posted
while the one before still computes. Each is a tenth percentile over alternating runs: nothing makes
Python faster than it is.
"""

import ctypes
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_hetero import HeteroStrategy
from lightning_hetero.core.actions import ActionKind, schedule_1f1b
from lightning_hetero.runtime.iteration.engine import Engine
from lightning_hetero.runtime.results import split_check
from tests.benchmarks import bench_runtime
from tests.benchmarks.bench_runtime import (
    FirstStage,
    LastStage,
    PlainModule,
    lightning_steps,
    slowest,
)
from tests.benchmarks.harness import Row
from tests.benchmarks.steps import Seconds, StepTimes, processes
from tests.toy import CONTEXT, VOCABULARY, TokenRows, ToyOptions, quiet

OPTIONS = ToyOptions(num_layers=4, width=16)
STEPS = 40
REPEATS = 3
ROWS = 2
"""Samples of a micro-batch."""
FEW, MANY = 4, 20
"""Micro-batches."""


def undisturbed(steps: list[Seconds]) -> Seconds:
    wall, cpu = (statistics.quantiles(column, n=10)[0] for column in zip(*steps, strict=True))
    return wall, cpu


def small() -> None:
    bench_runtime.OPTIONS, bench_runtime.STEPS = OPTIONS, STEPS


def against_ddp(rank: int) -> tuple[Seconds, Seconds]:
    """Return (ours, DDP's) step times on this rank."""
    small()
    ours: list[Seconds] = []
    theirs: list[Seconds] = []
    for _ in range(REPEATS):
        ours += lightning_steps(HeteroStrategy(num_microbatches=1), 8 * ROWS)
        theirs += lightning_steps(DDPStrategy(), 8 * ROWS)
    return undisturbed(ours), undisturbed(theirs)


class BareStage:
    """One of two stages with nothing around it."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        module = PlainModule(OPTIONS)
        self._rank = rank
        self._stage = FirstStage(module) if rank == 0 else LastStage(module)
        parameters = [*module.model.blocks[2 * rank : 2 * rank + 2].parameters()]
        self._optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        self._held: deque[tuple[Tensor, Tensor]] = deque()

    def iterate(self, ids: Tensor, labels: Tensor) -> None:
        count = len(ids) // ROWS
        self._optimizer.zero_grad()
        sends: list[Any] = []
        actions = schedule_1f1b(stage_index=self._rank, num_stages=2, num_microbatches=count)
        for action in actions:
            rows = slice(ROWS * action.microbatch_index, ROWS * (action.microbatch_index + 1))
            if action.kind is ActionKind.FORWARD:
                sends.append(self._forward(ids[rows], labels[rows]))
            else:
                sends.append(self._backward())
        for work in filter(None, sends):
            work.wait()
        self._optimizer.step()

    def _forward(self, ids: Tensor, labels: Tensor) -> Any:
        if self._rank == 0:
            given, made = ids, self._stage(ids)
            work = dist.isend(made.detach(), 1)
        else:
            given = torch.empty(ROWS, CONTEXT, OPTIONS.width)
            dist.recv(given, 0)
            logits = self._stage(given.requires_grad_())
            made = F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))
            work = None
        self._held.append((given, made))
        return work

    def _backward(self) -> Any:
        given, made = self._held.popleft()
        if self._rank == 1:
            made.backward()
            return dist.isend(given.grad, 0)
        gradient = torch.empty_like(made)
        dist.recv(gradient, 1)
        made.backward(gradient)
        return None


def bare_steps(rank: int, num_microbatches: int) -> list[Seconds]:
    stage, watch = BareStage(rank), StepTimes()
    data = TokenRows(ROWS * num_microbatches)
    for _ in range(STEPS):
        watch.start()
        stage.iterate(data.ids, data.labels)
        watch.stop()
    return watch.steps


def our_steps(rank: int, num_microbatches: int) -> list[Seconds]:
    strategy = HeteroStrategy(num_stages=2, num_microbatches=num_microbatches)
    return lightning_steps(strategy, ROWS * num_microbatches)


def against_bare_loop(rank: int) -> tuple[Seconds, Seconds]:
    """Return what an action costs on this rank, (ours, in the bare loop)."""
    small()
    cases: dict[tuple[Callable[..., list[Seconds]], int], list[Seconds]] = {
        (run, count): [] for count in (FEW, MANY) for run in (our_steps, bare_steps)
    }
    for _ in range(REPEATS):
        for (run, count), steps in cases.items():
            steps += run(rank, count)
            dist.barrier()
    times = {case: undisturbed(steps) for case, steps in cases.items()}

    def of_action(run: Callable[..., list[Seconds]]) -> Seconds:
        pairs = zip(times[run, FEW], times[run, MANY], strict=True)
        wall, cpu = ((many - few) / (2 * (MANY - FEW)) for few, many in pairs)
        return wall, cpu

    return of_action(our_steps), of_action(bare_steps)


class Costs(L.Callback):
    """CPU seconds of a part of the run, and the bytes that it adds to the process at most."""

    def __init__(self) -> None:
        self.found: list[tuple[float, int]] = []
        self._libc = ctypes.CDLL(None)
        self._libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: what is freed goes back at once.

    def begin(self) -> None:
        self._libc.malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")
        self._bytes, self._start_s = self._resident("VmRSS"), time.thread_time()

    def end(self) -> None:
        cpu_s = time.thread_time() - self._start_s
        self.found.append((cpu_s, self._resident("VmHWM") - self._bytes))

    def on_train_batch_start(self, *_: Any) -> None:
        self.begin()

    def on_train_batch_end(self, *_: Any) -> None:
        self.end()

    @staticmethod
    def _resident(name: str) -> int:
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def check_and_step(rank: int, width: int, rows: int) -> tuple[Seconds, Seconds]:
    """Return (CPU seconds, bytes) of a check and of a step without one, on this rank."""
    checks, steps, own = Costs(), Costs(), Engine._check_split
    usual, split_check._DUE = split_check._DUE, frozenset(range(4, STEPS, 2))

    def check(engine: Engine, *arguments: Any) -> None:
        checks.begin()
        own(engine, *arguments)
        checks.end()

    with mock.patch.object(Engine, "_check_split", check):
        strategy = HeteroStrategy(num_stages=2, num_microbatches=2)
        options = quiet(devices=2, max_steps=STEPS, limit_val_batches=0)
        loader = DataLoader(TokenRows(2 * rows * STEPS), batch_size=2 * rows)
        model = PlainModule(ToyOptions(num_layers=4, width=width))
        L.Trainer(strategy=strategy, callbacks=[steps], **options).fit(model, loader)
    split_check._DUE = usual
    columns = (zip(*checks.found, strict=True), zip(*steps.found[5::2], strict=True))
    check_s, check_bytes, step_s, step_bytes = map(statistics.median, chain(*columns))
    return (check_s, check_bytes), (step_s, step_bytes)


def checks() -> Iterator[Row]:
    for width, num_rows in ((64, 4), (512, 16)):
        with processes() as pool:
            figures = pool.run(check_and_step, 2, width, num_rows, timeout_s=500)
        for index, (what, unit, target) in enumerate(
            (("CPU time", "s", 3.0), ("memory", "B", 1.0))
        ):
            own, step = max(((a[index], b[index]) for a, b in figures), key=lambda i: i[0] / i[1])
            name = f"check over a step, two stages, width {width}, {what}"
            yield Row(name=name, ours=own, peer=step, unit=unit, target=target, note="our own step")


def run() -> list[Row]:
    rows = list(checks())
    cases = (
        ("iteration over DDP's, two equal pipelines", against_ddp, 1e-3, "Lightning DDPStrategy"),
        ("action over a bare loop's, two stages", against_bare_loop, 1e-4, "isend, recv, 1F1B"),
    )
    for name, function, target, peer_name in cases:
        with processes() as pool:
            figures = pool.run(function, 2, timeout_s=500)
        ours = slowest([item[0] for item in figures])
        peer = slowest([item[1] for item in figures])
        for what, own, other in zip(("wall time", "CPU time"), ours, peer, strict=True):
            figures = {"ours": own, "peer": other, "value": own - other}
            row = Row(name=f"{name}, width 16, {what}", target=target, note=peer_name, **figures)
            rows.append(row)
    return rows
