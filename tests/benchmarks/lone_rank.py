"""A `Trainer.fit` of one rank of a large run, without the others, under torch's `fake` group.

Operations of that group return at once and move nothing, so what is timed is this rank's own work:
tables, groups, Python, kernels, Lightning's loop. Rank 0 is the one that can be had so, because it
begins every broadcast and stands on a first stage, which is told no shapes by others; it is also
the busiest one. Layers have as many rows as the largest run has ranks, as those of large models do,
so every rank owns some of each weight, and they compute next to nothing.

The others say what this rank says. What they would do to it (waits, what rank 0 serves to all)
isn't seen, and a fit must not depend on them: checkpoints would wait for the others to save theirs.
The fake group's all-gather copies this rank's part into the place of each other rank, which is no
work of this rank's: its time is left out (58 of 200 ms with one stage and 1,024 ranks).
"""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.callbacks import RunMetrics, StragglerMonitor
from lightning_hetero.runtime.iteration import agreement, running_plan
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.strategy.processes import Processes
from tests.toy import quiet

NUM_LAYERS = 80
NUM_ROWS = 4096
WIDTH = 2
WEIGHTS = ("q", "k", "v", "o", "gate", "up", "down")
NUM_STEPS = 24
_DEVICES_PER_NODE = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan of equal pipelines for some ranks."""

    world_size: int
    num_stages: int = 1
    tp_degree: int = 1
    redundancy: int = 0

    def plan(self, num_stages: int) -> ParallelPlan:
        """Return a plan of the run with so many stages."""
        return ParallelPlan.even(
            world_size=self.world_size,
            num_layers=NUM_LAYERS,
            num_stages=num_stages,
            tp_degree=self.tp_degree,
        )


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Seconds of CPU of rank 0 of a case."""

    start_s: float
    """From `fit` to the first step."""
    step_s: float
    """From the end of a step to the end of the next one; median."""
    change_s: float
    """Of a change back to a plan that has run before, from one with half or twice the stages."""


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
    """Layers alone, with an optimizer that takes next to no time."""

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self._num_samples = num_samples
        self.layers = nn.ModuleList([Layer() for _ in range(NUM_LAYERS)])

    def training_step(self, batch: Tensor) -> Tensor:
        x = batch
        for layer in self.layers:
            x = layer(x)
        return x.mean()

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(self._num_samples, WIDTH), batch_size=1)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class _Environment(LightningEnvironment):
    """Rank 0 of many."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world_size = world_size

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 1

    @override
    def set_world_size(self, size: int) -> None: ...


class _Times(L.Callback):
    def __init__(self, case: Case, gathers_s: list[float]) -> None:
        self._case, self._gathers_s = case, gathers_s
        self.ends_s: list[float] = []
        self.begin_s = self.change_s = 0.0

    def on_train_start(self, *_: Any) -> None:
        self.begin_s = time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends_s.append(time.process_time() - sum(self._gathers_s))

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        case, engine = self._case, trainer.strategy.engine  # type: ignore[attr-defined]
        engine.change_plan(case.plan(case.num_stages // 2 if case.num_stages > 1 else 2))
        start_s = time.process_time()
        engine.change_plan(case.plan(case.num_stages))
        self.change_s = time.process_time() - start_s


def measure(case: Case) -> Figures:
    """Fit as rank 0 of a case; to be called in a process of its own."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.world_size)
    # The others have what this rank has, so each pipeline's samples seem to be the same.
    module = Module(num_samples=(NUM_STEPS + 1) * case.world_size)
    columns = {f"layers.*.{name}": "colwise_gather_output" for name in WEIGHTS}
    with _alone() as gathers_s, TemporaryDirectory() as folder:
        times = _Times(case, gathers_s)
        strategy = HeteroStrategy(
            plan=case.plan(case.num_stages),
            redundancy=case.redundancy,
            tp_plan=columns if case.tp_degree > 1 else None,
        )
        trainer = L.Trainer(
            **quiet(strategy=strategy, max_steps=NUM_STEPS, default_root_dir=folder),
            devices=_DEVICES_PER_NODE,
            num_nodes=case.world_size // _DEVICES_PER_NODE,
            plugins=[_Environment(case.world_size)],
            callbacks=[StragglerMonitor(), RunMetrics(), times],
        )
        start_s = time.process_time()
        trainer.fit(module)
    dist.destroy_process_group()
    steps_s = [later - end for end, later in pairwise(times.ends_s[2:])]
    return Figures(
        start_s=times.begin_s - start_s,
        step_s=statistics.median(steps_s),
        change_s=times.change_s,
    )


@contextmanager
def _alone() -> Iterator[list[float]]:
    """Let all other processes be fakes; gives the seconds of CPU of each all-gather."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather, all_to_all, new_group = getattr(dist, name), dist.all_to_all_single, dist.new_group
    seconds: list[float] = []

    @wraps(gather)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start_s = time.process_time()
        work = gather(*args, **kwargs)
        seconds.append(time.process_time() - start_s)
        return work

    @wraps(all_to_all)
    def sent(received: Tensor, given: Tensor, *splits: Any, **kwargs: Any) -> Any:
        # The fake group refuses to send nothing: this rank sends to itself.
        if received.numel() and not given.numel():
            given, splits = torch.zeros_like(received), (splits[0], splits[0])
        return all_to_all(received, given, *splits, **kwargs)

    def fake(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        return new_group(*args, **kwargs)

    def meet(processes: Processes, environment: Any, device: Any, _: Any = None) -> Any:
        processes._environment = environment
        if processes._comms is None:
            processes._comms = Communicators.create(device=device, timeout=dist.default_pg_timeout)
        return environment

    def broadcast(_: HeteroStrategy, obj: Any, src: int = 0) -> Any:
        return obj

    def reduce(_: Processes, tensor: Tensor, *__: Any) -> Tensor:
        return tensor

    patches = [
        mock.patch.multiple(dist, **{name: timed, "all_to_all_single": sent, "new_group": fake}),
        mock.patch.multiple(Processes, meet=meet, reduce=reduce),
        mock.patch.object(HeteroStrategy, "broadcast", broadcast),
        # Of all pipelines this one's samples come back.
        mock.patch.object(agreement, "_check_fingerprints"),
        # Large layers travel by themselves.
        mock.patch.object(running_plan, "MERGED_NUMEL", 0),
        # Messages that never come leave buffers as they were made.
        *(
            mock.patch.object(owner, made, _zeroed(getattr(owner, made)))
            for owner, made in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty"))
        ),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield seconds


def _zeroed(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: make(*args, **kwargs).zero_()
