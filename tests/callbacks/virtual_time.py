"""Let a run's processes live in a time of their own, in which nothing sleeps.

Every action takes about a millisecond of CPU times the rank's slowdown, sleeping moves the clock
only, and at the end of a batch all ranks set their clocks to the latest one, as waiting for each
other does. What the monitor sees is then the same on every machine, noise included.
"""

import random
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist

from lightning_hetero.callbacks import step_times, straggler_session
from lightning_hetero.runtime import clock
from lightning_hetero.straggler import probe
from lightning_hetero.testing import faults

_CPU_S = 1e-3
_READING_S = 1e-6
_NOISE = 0.02


class VirtualTime(L.Callback):
    """Stands in for the module `time`; must be the first callback."""

    def __init__(self, patch: pytest.MonkeyPatch, seed: int) -> None:
        self._noise = random.Random(seed)
        self.wall_s = self.cpu_s = 100.0
        self.action_s = _CPU_S
        for module in (clock, step_times, probe, straggler_session, faults):
            patch.setattr(module, "time", self)
        begin = clock.ComputeClock._begin_action

        def begin_and_compute(own: clock.ComputeClock) -> None:
            begin(own)
            self.compute()

        patch.setattr(clock.ComputeClock, "_begin_action", begin_and_compute)

    def compute(self) -> None:
        """Let an action's CPU time pass."""
        seconds = self.action_s * self._noise.gauss(1.0, _NOISE)
        self.wall_s += seconds
        self.cpu_s += seconds

    def perf_counter(self) -> float:
        self.wall_s += _READING_S
        return self.wall_s

    def thread_time(self) -> float:
        return self.cpu_s

    def sleep(self, seconds: float) -> None:
        self.wall_s += seconds

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._meet()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._meet()
        self.action_s = _CPU_S  # For probes.

    def _meet(self) -> None:
        latest = torch.tensor([self.wall_s], dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(latest, op=dist.ReduceOp.MAX)
        self.wall_s = float(latest)
