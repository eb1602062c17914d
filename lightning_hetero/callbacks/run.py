"""A run as its callbacks see it: its strategy, its other callbacks and its ranks."""

from collections.abc import Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy

from lightning_hetero.core.arrays import FloatArray
from lightning_hetero.runtime.ranks.communicators import Communicators, Rows
from lightning_hetero.strategy.hetero import HeteroStrategy
from lightning_hetero.strategy.run import Run

__all__ = ["Ranks", "note", "run_of"]

_T = TypeVar("_T")

_OTHERS: WeakKeyDictionary[Strategy, Run] = WeakKeyDictionary()
"""The runs of strategies that have no `run` of their own."""


def run_of(trainer: pl.Trainer) -> Run:
    """Return the run in which a Trainer's callbacks find each other, under any strategy."""
    if isinstance(trainer.strategy, HeteroStrategy):
        return trainer.strategy.run
    return _OTHERS.setdefault(trainer.strategy, Run())


def note(trainer: pl.Trainer, event: str, **fields: Any) -> None:
    """Write an event on rank 0, if the run keeps a log."""
    if trainer.is_global_zero:
        for log in run_of(trainer).logs:
            log.write(trainer, event, **fields)


class Ranks:
    """The ranks of a run and their small messages, on CPU.

    Args:
        group: A gloo group of all ranks; None if there is only one.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.global_rank = 0 if group is None else dist.get_rank(group)
        self._comms = Communicators(
            global_rank=self.global_rank, world_size=self.world_size, control=group
        )

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self.global_rank == 0

    def to_leader(self, row: Sequence[float]) -> FloatArray:
        """Return every rank's row on the leader, (num_ranks, length); no rows elsewhere."""
        rows = Rows(torch.tensor(row, dtype=torch.float64), self._group).on_rank_0()
        found: FloatArray = (rows if self.leads else rows[:0]).numpy()
        return found

    def from_leader(self, numbers: Sequence[int]) -> list[int]:
        """Return the leader's numbers; the other ranks pass as many, which don't count."""
        values = torch.tensor(numbers, dtype=torch.int64)
        if self._group is not None:
            dist.broadcast(values, 0, self._group)
        found: list[int] = values.tolist()
        return found

    def gather(self, value: _T) -> list[_T]:
        """Return every rank's value."""
        return self._comms.gather_objects(value)

    def share(self, value: _T) -> _T:
        """Return the leader's value."""
        return self._comms.on_rank_0(lambda: value)
