"""Let the ranks of one CPU emulate devices of different speed, and fast links slow ones.

Each forward and backward of a rank is stretched, by sleeping, to its own CPU time multiplied by the
rank's slowdown. Sleeping uses no core, so there can be more ranks than cores, as long as the sum of
1 / slowdown stays below the number of cores: four ranks with slowdowns 8, 8, 4, 4 keep three
quarters of a core busy. Waits, transfers and the optimizer's step keep their time.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.runtime.clock import ComputeClock
from lightning_hetero.runtime.setup.detect import Seat, cluster_of, describe_device, slowed
from lightning_hetero.strategy.hetero import HeteroStrategy

__all__ = ["EmulatedClock", "EmulatedDevices", "LinkDelay", "emulate"]


class LinkDelay(NamedTuple):
    """By how much the arrival of messages is delayed."""

    bytes_per_s: float = math.inf
    """Bandwidth, above 0."""
    latency_s: float = 0.0
    """Seconds added to each message, 0 or more."""


class EmulatedClock(ComputeClock):
    """Stretches actions to their CPU time times a slowdown, and delays the arrival of messages.

    The CPU time is that of the thread, so other processes of the machine don't count.

    ::

        clock = EmulatedClock(torch.device("cpu"), slowdown=4.0)
        with clock.iteration(), clock.action(ActionKind.FORWARD, 0):
            compute()  # takes four times as long

    Args:
        device: The rank's device, a CPU.
        slowdown: See the property.
    """

    def __init__(self, device: torch.device, *, slowdown: float = 1.0) -> None:
        super().__init__(device)
        self.delays: Mapping[int, LinkDelay] = {}
        """By global rank of the sender, how messages are delayed; those of other ranks aren't."""
        self._wall_start = self._cpu_start = 0.0
        self._wall_wait = self._cpu_wait = 0.0
        self.slowdown = slowdown

    @property
    def slowdown(self) -> float:
        """The factor by which an action takes longer than its CPU time, 1 or more."""
        return self._slowdown

    @slowdown.setter
    def slowdown(self, slowdown: float) -> None:
        if not slowdown >= 1:
            raise ConfigurationError(
                f"slowdown is {slowdown}; it must be 1 or more, because sleeping makes nothing "
                "faster. Scale all factors so that the fastest rank has 1."
            )
        if slowdown > 1 and self._is_cuda:
            raise ConfigurationError(
                f"slowdown is {slowdown} on a CUDA device; only CPU ranks can be slowed down. Use "
                'Trainer(accelerator="cpu").'
            )
        self._slowdown = slowdown

    @override
    def before_send(self) -> None:
        """Sleep until the running action has taken as long as the slowdown requires."""
        if self._slowdown == 1 or not self._in_action or self._depth:
            return
        cpu_s = time.thread_time() - self._cpu_start - self._cpu_wait
        due = self._wall_start + self._wall_wait + cpu_s * self._slowdown
        missing_s = due - time.perf_counter()
        if missing_s > 0:
            time.sleep(missing_s)

    @override
    def _delay_message(self, peer: int, num_bytes: int) -> None:
        delay = self.delays.get(peer)
        if delay is not None and num_bytes:  # Headers aren't delayed besides their messages.
            time.sleep(delay.latency_s + num_bytes / delay.bytes_per_s)

    @override
    def _begin_action(self) -> None:
        super()._begin_action()
        if self._slowdown > 1:  # After the clock has started, so that nothing lies between.
            self._wall_start, self._cpu_start = time.perf_counter(), time.thread_time()
            self._wall_wait = self._cpu_wait = 0.0

    @override
    def _begin_wait(self) -> None:
        if self._slowdown > 1 and self._depth == 0:
            self._wall_wait -= time.perf_counter()
            self._cpu_wait -= time.thread_time()
        super()._begin_wait()

    @override
    def _end_wait(self) -> None:
        super()._end_wait()
        if self._slowdown > 1 and self._depth == 0:
            self._wall_wait += time.perf_counter()
            self._cpu_wait += time.thread_time()


def emulate(strategy: HeteroStrategy) -> None:
    """Make a strategy's rank as slow as `strategy.emulation.slowdown` says at the run's set-up."""

    def make_clock(device: torch.device) -> EmulatedClock:
        return EmulatedClock(device, slowdown=strategy.emulation.slowdown)

    strategy.emulation = replace(strategy.emulation, make_clock=make_clock)


class EmulatedDevices(Callback):
    """Give each rank a device of its own speed; pass it to the Trainer beside `HeteroStrategy`.

    ::

        devices = EmulatedDevices(slowdowns=(8, 8, 4, 4))
        Trainer(accelerator="cpu", devices=4, strategy=HeteroStrategy(), callbacks=[devices])

    Args:
        slowdowns: For each global rank the factor by which its computations take longer, 1 or more.
            Or one number, that of this process, if nodes join and leave so that ranks aren't known
            in advance. An automatic plan sees devices of these speeds.
        memory_bytes: The memory of each device that an automatic plan sees, so that it has to cut
            the model; ranks aren't limited to it. None takes a share of the host's.

    Raises:
        ConfigurationError: A slowdown is below 1, or (in `setup`) the Trainer runs another strategy
            or another number of ranks.
    """

    def __init__(
        self, slowdowns: Sequence[float] | float, *, memory_bytes: int | None = None
    ) -> None:
        self._is_own = isinstance(slowdowns, int | float)
        self.slowdowns = (slowdowns,) if isinstance(slowdowns, int | float) else tuple(slowdowns)
        self.memory_bytes = memory_bytes
        if not self.slowdowns or not all(slowdown >= 1 for slowdown in self.slowdowns):
            raise ConfigurationError(
                f"EmulatedDevices has slowdowns {list(self.slowdowns)}; give one for each rank, "
                "1 or more, because sleeping makes nothing faster."
            )

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, HeteroStrategy):
            raise ConfigurationError(
                f"EmulatedDevices slows HeteroStrategy's ranks down, but {type(strategy).__name__} "
                "runs. Use Trainer(strategy=HeteroStrategy())."
            )
        if not self._is_own and trainer.world_size != len(self.slowdowns):
            raise ConfigurationError(
                f"EmulatedDevices has {len(self.slowdowns)} slowdowns but {trainer.world_size} "
                "ranks run. Give one for each rank."
            )
        strategy.emulation = replace(
            strategy.emulation,
            slowdown=self.slowdowns[0 if self._is_own else trainer.global_rank],
            memory_bytes=self.memory_bytes,
        )
        emulate(strategy)

    def cluster(self) -> Cluster:
        """Return these devices as one host's cluster, for the planner and the simulator.

        Peak and memory bandwidth are this machine's rough figures divided by the slowdown;
        consecutive ranks of equal slowdown are a node.
        """
        base = describe_device(torch.device("cpu"))
        seats = [
            Seat(host="localhost", device=slowed(base, factor), base=base.name, slowdown=factor)
            for factor in self.slowdowns
        ]
        return cluster_of(seats)
