"""Make ranks and links slow for a while, by schedule, to see what a run does about it.

A slow rank sleeps in its forwards and backwards, a slow link lets every message over it arrive
late, activations as well as weights and gradients, in proportion to its bytes. Sleeping costs no
core, so faults of many ranks can be played on one CPU. What watches the run for stragglers can't
tell such a fault from a real one: its probes are slowed too.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.strategy.run import note, run_of
from lightning_hetero.testing import EmulatedClock, LinkDelay, emulate


@dataclass(frozen=True, kw_only=True)
class Fault:
    """When a fault holds.

    Raises:
        ConfigurationError: A number is out of range.
    """

    start: float
    """First training step."""
    duration: float = math.inf
    """Steps for which it holds."""

    def __post_init__(self) -> None:
        if not self.start >= 0 or not self.duration > 0:
            raise ConfigurationError(
                f"A fault has start {self.start} and duration {self.duration}; the first must be 0 "
                "or more, the second above 0."
            )

    def holds(self, now: float) -> bool:
        """Return whether the fault holds at a step."""
        return self.start <= now < self.start + self.duration

    @property
    def involved(self) -> tuple[int, ...]:
        """The ranks that it slows down."""
        return ()


@dataclass(frozen=True, kw_only=True)
class SlowRank(Fault):
    """A rank that computes more slowly."""

    global_rank: int
    slowdown: float
    """How many times longer its forwards and backwards take, 1 or more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.slowdown >= 1:
            raise ConfigurationError(
                f"Rank {self.global_rank} has slowdown {self.slowdown}; it must be 1 or more, "
                "because sleeping makes nothing faster."
            )

    @property
    @override
    def involved(self) -> tuple[int, ...]:
        return (self.global_rank,)


@dataclass(frozen=True, kw_only=True)
class SlowLink(Fault):
    """A link between two ranks that is slow both ways."""

    ranks: tuple[int, int]
    bytes_per_s: float = math.inf
    """Bandwidth of each direction, above 0; what messages really take comes on top."""
    latency_s: float = 0.0
    """Seconds that each message takes longer, 0 or more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.bytes_per_s > 0 or not 0 <= self.latency_s < math.inf:
            raise ConfigurationError(
                f"A link has latency_s {self.latency_s} and bytes_per_s {self.bytes_per_s}; the "
                "first must be 0 or more, the second above 0."
            )

    @property
    @override
    def involved(self) -> tuple[int, ...]:
        return self.ranks


class InjectFaults(Callback):
    """Slow ranks and links down while training; pass it to the Trainer on every rank.

    ::

        faults = [
            SlowRank(start=100, duration=50, global_rank=3, slowdown=1.9),
            SlowLink(start=200, ranks=(0, 2), bytes_per_s=1e8),
        ]
        Trainer(strategy=HeteroStrategy(), callbacks=[StragglerMonitor(), InjectFaults(faults)])

    Args:
        faults: What is slow, and when; several may hold at once.

    Raises:
        ConfigurationError: (in `setup`) A fault names a rank that doesn't run, or the strategy
            isn't `HeteroStrategy`.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        self._slowdown = 1.0
        self._holding: tuple[Fault, ...] = ()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for fault in self.faults:
            missing = [rank for rank in fault.involved if not 0 <= rank < trainer.world_size]
            if missing:
                raise ConfigurationError(
                    f"A fault names rank {missing[0]} but {trainer.world_size} ranks run (0 to "
                    f"{trainer.world_size - 1}). Name ranks that run."
                )
        emulate(run_of(trainer).strategy)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        self._apply(trainer, [fault for fault in self.faults if fault.holds(step)])

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._apply(trainer, [])

    def _apply(self, trainer: pl.Trainer, faults: Sequence[Fault]) -> None:
        if tuple(faults) != self._holding:
            self._holding = tuple(faults)
            note(trainer, "faults", faults=[asdict(fault) for fault in faults])
        own = trainer.global_rank
        self._slowdown = math.prod(
            fault.slowdown
            for fault in faults
            if isinstance(fault, SlowRank) and fault.global_rank == own
        )
        strategy = run_of(trainer).strategy
        clock = strategy.engine.clock
        assert isinstance(clock, EmulatedClock)
        clock.slowdown = strategy.emulation.slowdown * self._slowdown
        links = [f for f in faults if isinstance(f, SlowLink) and own in f.ranks]
        clock.delays = {
            sum(f.ranks) - own: LinkDelay(bytes_per_s=f.bytes_per_s, latency_s=f.latency_s)
            for f in links
        }
