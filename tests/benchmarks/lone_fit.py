"""A whole `Trainer.fit` of one rank of a large run, without the others.

As `lone_rank`, which this needs, but from the start: facts of the run, room for states, the
engine, the report, watching, Lightning's loop. The others say what this rank says. A fit must not
depend on them: checkpoints would wait for the others to save theirs.
"""

import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_hetero import HeteroStrategy
from lightning_hetero.callbacks import RunMetrics, StragglerMonitor
from lightning_hetero.runtime.iteration import agreement
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.strategy.processes import Processes
from tests.benchmarks.lone_rank import (
    WIDTH,
    Case,
    Module,
    empty_inputs,
    fake_groups,
    timed_gathers,
    zeroed_buffers,
)

__all__ = ["FitFigures", "measure_fit"]

NUM_STEPS = 24
_DEVICES_PER_NODE = 8


@dataclass(frozen=True, kw_only=True)
class FitFigures:
    """What rank 0 of a case does in a fit."""

    start_s: float
    """Seconds of CPU from `fit` to the first step."""
    step_s: float
    """Seconds of CPU from the end of a step to the end of the next one; median."""


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


class _Trained(Module):
    """The layers with an optimizer that takes next to no time, and samples."""

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self._num_samples = num_samples

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(self._num_samples, WIDTH), batch_size=1)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class _Times(L.Callback):
    def __init__(self, gathers_s: list[float]) -> None:
        self._gathers_s = gathers_s
        self.ends_s: list[float] = []
        self.begin_s = 0.0

    def on_train_start(self, *_: Any) -> None:
        self.begin_s = time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends_s.append(time.process_time() - sum(self._gathers_s))


def measure_fit(case: Case) -> FitFigures:
    """Fit as rank 0 of a case; to be called in a process of its own."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.world_size)
    # The others have what this rank has, so each pipeline's samples seem to be the same.
    module = _Trained(num_samples=(NUM_STEPS + 1) * case.world_size)
    with (
        fake_groups(),
        zeroed_buffers(),
        empty_inputs(),
        timed_gathers() as gathers_s,
        _alone(),
        TemporaryDirectory() as folder,
    ):
        times = _Times(gathers_s)
        trainer = L.Trainer(
            strategy=HeteroStrategy(
                plan=case.plan, ownership=case.ownership, redundancy=case.redundancy
            ),
            accelerator="cpu",
            devices=_DEVICES_PER_NODE,
            num_nodes=case.world_size // _DEVICES_PER_NODE,
            plugins=[_Environment(case.world_size)],
            callbacks=[StragglerMonitor(), RunMetrics(), times],
            max_steps=NUM_STEPS,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        start_s = time.process_time()
        trainer.fit(module)
    dist.destroy_process_group()
    ends_s = times.ends_s[2:]
    steps_s = [later - end for end, later in pairwise(ends_s)]
    return FitFigures(start_s=times.begin_s - start_s, step_s=statistics.median(steps_s))


@contextmanager
def _alone() -> Iterator[None]:
    """Let a strategy's processes be this one and fakes."""

    def meet(processes: Processes, environment: Any, device: Any, _: Any = None) -> Any:
        processes._environment = environment
        if processes._comms is None:
            processes._comms = Communicators.create(device=device, timeout=dist.default_pg_timeout)
        return environment

    def broadcast(_: Processes, obj: Any, src: int = 0) -> Any:
        return obj

    def reduce(_: Processes, tensor: Tensor, *__: Any) -> Tensor:
        return tensor

    with (
        mock.patch.multiple(Processes, meet=meet, broadcast=broadcast, reduce=reduce),
        mock.patch.object(Processes, "compare_hooks"),
        # Of all pipelines this one's samples come back.
        mock.patch.object(agreement, "_check_fingerprints"),
    ):
        yield
