"""One rank of a large run, without the others: the real `Engine` under torch's `fake` group.

Operations of that group return at once and move nothing, so what is timed is this rank's own work:
tables, groups, Python, kernels. Rank 0 is the one that can be had so, because it begins every
broadcast and stands on a first stage, which is told no shapes by others; it is also the busiest
one. Layers have as many rows as the largest run has ranks, as those of large models do, so every
rank owns some of each weight, and they compute next to nothing.

What the other ranks would do to this one (waits, what rank 0 serves to all) isn't seen here. The
fake group's all-gather copies this rank's part into the place of each other rank, which is no work
of this rank's: its time is left out (58 of 200 ms with one stage and 1,024 ranks).
"""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_hetero import ParallelPlan
from lightning_hetero.exchange.slices import Ownership
from lightning_hetero.runtime.clock import ComputeClock
from lightning_hetero.runtime.iteration import running_plan
from lightning_hetero.runtime.iteration.config import EngineConfig, IterationKey, Phase
from lightning_hetero.runtime.iteration.engine import Engine
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.setup.layout import ModelLayout
from lightning_hetero.runtime.tensor_parallel.sharding import TensorParallel

__all__ = [
    "WIDTH",
    "Case",
    "Figures",
    "Module",
    "empty_inputs",
    "fake_groups",
    "measure",
    "timed_gathers",
    "zeroed_buffers",
]

NUM_LAYERS = 80
NUM_ROWS = 4096
WIDTH = 2
WEIGHTS = ("q", "k", "v", "o", "gate", "up", "down")
NUM_ITERATIONS = 5
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan of equal pipelines for some ranks."""

    world_size: int
    num_stages: int = 1
    tp_degree: int = 1
    ownership: Ownership = Ownership.HOLDERS
    redundancy: int = 0

    @property
    def plan(self) -> ParallelPlan:
        """The plan that the run begins with."""
        return self._plan_of(self.num_stages)

    @property
    def other_plan(self) -> ParallelPlan:
        """A plan to change to: half as many stages, or two instead of one."""
        return self._plan_of(self.num_stages // 2 if self.num_stages > 1 else 2)

    @property
    def has_other_plan(self) -> bool:
        """Whether there are ranks enough for that."""
        return self.num_stages > 1 or self.world_size >= 2 * self.tp_degree

    def _plan_of(self, num_stages: int) -> ParallelPlan:
        return ParallelPlan.even(
            world_size=self.world_size,
            num_layers=NUM_LAYERS,
            num_stages=num_stages,
            tp_degree=self.tp_degree,
        )


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What rank 0 of a case does."""

    set_up_s: float
    """Seconds of CPU to make the engine."""
    change_s: float
    """Seconds of CPU to change back to a plan that has run before."""
    iteration_s: float
    """Seconds of CPU of a training iteration; median."""


class Layer(nn.Module):
    """As many weights as a Llama layer has, each of `NUM_ROWS` rows."""

    def __init__(self) -> None:
        super().__init__()
        for name in WEIGHTS:
            self.add_module(name, nn.Linear(WIDTH, NUM_ROWS, bias=False))
        self.norm1 = nn.Parameter(torch.ones(NUM_ROWS))
        self.norm2 = nn.Parameter(torch.ones(NUM_ROWS))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm1 + self.norm2
        for name in WEIGHTS:
            out = out + self.get_submodule(name)(x)
        return x + 1e-3 * out.mean(-1, keepdim=True)


class Module(L.LightningModule):
    """Layers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(NUM_LAYERS)])

    def training_step(self, batch: Tensor) -> Tensor:
        x = batch
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def measure(case: Case) -> Figures:
    """Set up and run rank 0 of a case; to be called in a process of its own."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.world_size)
    module = Module()
    with (
        fake_groups(),
        zeroed_buffers(),
        empty_inputs(),
        # Large layers travel by themselves.
        mock.patch.object(running_plan, "MERGED_NUMEL", 0),
        timed_gathers() as gathers_s,
    ):
        start_s = time.process_time()
        engine = _engine(module, case)
        set_up_s = time.process_time() - start_s
        seconds = []
        for index in range(NUM_ITERATIONS + 1):
            gathers_s.clear()
            seconds.append(_train(engine, index) - sum(gathers_s))
        change_s = _change_back(engine, case)
    dist.destroy_process_group()
    return Figures(set_up_s=set_up_s, change_s=change_s, iteration_s=statistics.median(seconds[1:]))


def _engine(module: Module, case: Case) -> Engine:
    layout, tensor_parallel = ModelLayout.of(module), None
    if case.tp_degree > 1:
        styles = {f"layers.*.{name}": "colwise_gather_output" for name in WEIGHTS}
        tensor_parallel = TensorParallel(module, layout, option=styles)
        layout = tensor_parallel.layout
    communicators = Communicators.create(device=_CPU, timeout=dist.default_pg_timeout)
    num_microbatches = case.plan.pipelines[0].usual_num_microbatches
    return Engine(
        module,
        layout,
        case.plan,
        communicators,
        config=EngineConfig(num_microbatches=num_microbatches, ownership=case.ownership),
        device=_CPU,
        clock=ComputeClock(_CPU),
        tensor_parallel=tensor_parallel,
    )


def _train(engine: Engine, index: int) -> float:
    """Run one training iteration of one row a micro-batch; returns its seconds of CPU."""
    key = IterationKey(phase=Phase.TRAIN, epoch=0, batch_idx=index)
    batch = torch.ones(engine.num_microbatches[0], WIDTH)
    start_s = time.process_time()
    engine.mark_weights_stale(only_trainable=True)
    engine.run(engine.module.training_step, batch, key)
    return time.process_time() - start_s


def _change_back(engine: Engine, case: Case) -> float:
    """Change to another plan; returns the seconds of the change back to the first one."""
    engine.change_plan(case.other_plan)
    start_s = time.process_time()
    engine.change_plan(case.plan)
    return time.process_time() - start_s


@contextmanager
def fake_groups() -> Iterator[None]:
    """Make all groups fake, whatever backend they are to have."""
    new_group = dist.new_group

    def fake(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        return new_group(*args, **kwargs)

    with mock.patch.object(dist, "new_group", fake):
        yield


@contextmanager
def timed_gathers() -> Iterator[list[float]]:
    """Time each all-gather of the fake group, in seconds of CPU."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather, seconds = getattr(dist, name), list[float]()

    @wraps(gather)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start_s = time.process_time()
        work = gather(*args, **kwargs)
        seconds.append(time.process_time() - start_s)
        return work

    with mock.patch.object(dist, name, timed):
        yield seconds


@contextmanager
def zeroed_buffers() -> Iterator[None]:
    """Make buffers of zeros, as messages that never come leave them as they were made."""
    with ExitStack() as patches:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            patches.enter_context(mock.patch.object(owner, name, _zeroed(getattr(owner, name))))
        yield


@contextmanager
def empty_inputs() -> Iterator[None]:
    """Let a rank send nothing in an all-to-all, which the fake one refuses: it sends to itself."""
    all_to_all = dist.all_to_all_single

    @wraps(all_to_all)
    def sent(received: Tensor, given: Tensor, *splits: Any, **kwargs: Any) -> Any:
        if received.numel() and not given.numel():
            given, splits = torch.zeros_like(received), (splits[0], splits[0])
        return all_to_all(received, given, *splits, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", sent):
        yield


def _zeroed(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: make(*args, **kwargs).zero_()
