"""Let a run's processes live in a time of their own, in which nothing sleeps.

Every action takes about a millisecond of CPU times the rank's slowdown, sleeping moves the clock
only, and at the end of a batch all ranks set their clocks to the latest one, as waiting for each
other does. What the monitor sees is then the same on every machine, noise included; so is the
profile from which plans are made.
"""

import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist

from lightning_hetero import HeteroStrategy, testing
from lightning_hetero.callbacks import run_metrics
from lightning_hetero.callbacks.watching import session, step_times
from lightning_hetero.core.profile import BlockTimes
from lightning_hetero.models.batches import AssignedBatch
from lightning_hetero.runtime import clock
from lightning_hetero.runtime.setup import profiling
from lightning_hetero.runtime.setup.profiling import ModelShard
from lightning_hetero.straggler import probe

_CPU_S = 1e-3
_READING_S = 1e-6
_NOISE = 0.02

_LAYER_S = 1e-4
_TOKEN_S = 4e-6
_PAIR_S = 2e-8
_STEP_S_PER_PARAM = 2e-9


class VirtualTime(L.Callback):
    """Stands in for the module `time`; must be the first callback."""

    def __init__(self, patch: pytest.MonkeyPatch, seed: int) -> None:
        self._noise = random.Random(seed)
        self.wall_s = self.cpu_s = 100.0
        self.action_s = _CPU_S
        self.num_layers = 0
        """Of the model, if an action takes about a millisecond for each; 0: it takes one."""
        timed = (clock, testing, step_times, probe, run_metrics, session)
        for module in timed:
            patch.setattr(module, "time", self)
        for kind in (clock.ComputeClock, testing.EmulatedClock):
            patch.setattr(kind, "_begin_action", self._computing(kind))

    def _computing(self, kind: type[clock.ComputeClock]) -> Callable[[Any], None]:
        """Return a clock's begin of an action, behind all of which the action computes."""
        begin = kind._begin_action

        def begin_and_compute(own: clock.ComputeClock) -> None:
            begin(own)
            if type(own) is kind:
                self.compute()

        return begin_and_compute

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
        self._meet(trainer)
        strategy = trainer.strategy
        if self.num_layers and isinstance(strategy, HeteroStrategy):
            self.action_s = _CPU_S * self.num_layers * strategy.plan.share(trainer.global_rank)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._meet(trainer)
        self.action_s = _CPU_S  # For probes.

    def _meet(self, trainer: L.Trainer) -> None:
        latest = torch.tensor([self.wall_s], dtype=torch.float64)
        strategy = trainer.strategy
        # A rank that died is named by the strategy, wherever the others wait for it.
        watched = (
            strategy.processes.watching() if isinstance(strategy, HeteroStrategy) else nullcontext()
        )
        if dist.is_initialized():
            with watched:
                dist.all_reduce(latest, op=dist.ReduceOp.MAX)
        self.wall_s = float(latest)


class PackedVirtualTime(VirtualTime):
    """Virtual time in which an action takes as long as its tokens and layers ask for.

    Args:
        patch: See `VirtualTime`.
        seed: See `VirtualTime`.
        token_s: CPU time of a token in all layers, forward or backward.
    """

    def __init__(self, patch: pytest.MonkeyPatch, seed: int, *, token_s: float = 2e-4) -> None:
        super().__init__(patch, seed)
        self._token_s = token_s

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        super().on_train_batch_start(trainer, *args)
        batch = args[1]
        if isinstance(batch, AssignedBatch):
            sizes = [item.num_tokens for item in batch.microbatches] or [0]
            share = batch.plan.share(trainer.global_rank)
            self.action_s = self._token_s * share * sum(sizes) / len(sizes)


def of_a_process() -> VirtualTime:
    """Let this process live in virtual time until it ends."""
    patch = pytest.MonkeyPatch()
    patch.setattr(profiling, "_measure_times", _times)
    patch.setattr(profiling, "_measure_step", lambda *_: _STEP_S_PER_PARAM)
    return PackedVirtualTime(patch, seed=os.getpid(), token_s=2e-5)


def _times(
    shard: ModelShard, lengths: tuple[int, ...], options: profiling.ProfileOptions
) -> BlockTimes:
    """Return what measuring layers finds in this time: a part for each layer, token and pair."""

    def passes(layers: float) -> tuple[float, float]:
        pairs = sum(length * length for length in lengths)
        seconds = layers * (_LAYER_S + _TOKEN_S * sum(lengths) + _PAIR_S * pairs)
        return seconds, 2 * seconds

    sizes = [2**i for i in range(len(shard.model.layers).bit_length())]
    return BlockTimes(
        tp_degree=shard.tp_degree,
        lengths=lengths,
        blocks={size: passes(size) for size in sizes},
        embedding=passes(0.1),
        head=passes(0.1),
    )
