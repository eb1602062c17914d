"""Let the ranks of one CPU play devices of different speed.

Each forward and backward of a rank is stretched by sleeping until it has taken its own CPU time
times the rank's slowdown. Sleeping costs no core, so more ranks than cores can run, as long as the
sum of 1 / slowdown stays below the number of cores: four ranks with slowdowns 8, 8, 4, 4 keep three
quarters of a core busy. Waits, transfers and the optimizer's step keep their time.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.runtime.setup.detect import Seat, cluster_of, describe_device, slowed
from lightning_hetero.strategy.hetero import HeteroStrategy
from lightning_hetero.testing.emulated_clock import emulate

__all__ = ["EmulatedDevices"]


class EmulatedDevices(Callback):
    """Give each rank a device of its own speed; pass it to the Trainer beside `HeteroStrategy`.

    ::

        devices = EmulatedDevices(slowdowns=(8, 8, 4, 4))
        Trainer(accelerator="cpu", devices=4, strategy=HeteroStrategy(), callbacks=[devices])

    Args:
        slowdowns: For each global rank how many times longer it computes, 1 or more; or one number,
            this process's, where nodes come and go and nobody knows who gets which rank. An
            automatic plan sees devices of these speeds.
        memory_bytes: The memory of each that an automatic plan sees, so that it has to cut the
            model; nothing holds a rank to it. None takes its share of the host's.

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
                f"EmulatedDevices has slowdowns {list(self.slowdowns)}; give one a rank, 1 or "
                "more, because sleeping makes nothing faster."
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
                "ranks run. Give one a rank."
            )
        strategy.emulation = replace(
            strategy.emulation,
            slowdown=self.slowdowns[0 if self._is_own else trainer.global_rank],
            memory_bytes=self.memory_bytes,
        )
        emulate(strategy)

    def cluster(self) -> Cluster:
        """Return these devices as one host's cluster, for the planner and the simulator.

        Peak and memory bandwidth are this machine's rough figures over the slowdown; ranks that
        follow each other with one slowdown are a node.
        """
        base = describe_device(torch.device("cpu"))
        seats = [
            Seat(host="localhost", device=slowed(base, factor), base=base.name, slowdown=factor)
            for factor in self.slowdowns
        ]
        return cluster_of(seats)

    def __str__(self) -> str:
        runs = [(factor, len(list(group))) for factor, group in groupby(self.slowdowns)]
        return ", ".join(f"{count} × 1/{factor:g}" for factor, count in runs)
