"""The run: where its strategy, its callbacks and its ranks find each other."""

from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy

from lightning_hetero.runtime.ranks.communicators import Communicators

if TYPE_CHECKING:
    from lightning_hetero.callbacks import ElasticRestart, LayerwiseCheckpoint, RunLog
    from lightning_hetero.strategy.hetero import HeteroStrategy

_T = TypeVar("_T")


class Run:
    """One run, through which its callbacks find each other: each adds itself in its `setup`.

    It is `HeteroStrategy.run`; under another strategy `run_of` makes one without a `strategy`.

    Args:
        strategy: The strategy, whose plan may change; None under strategies without plans.
    """

    def __init__(self, strategy: "HeteroStrategy | None" = None) -> None:
        self.strategy = strategy
        self.logs: list[RunLog] = []
        """Callbacks that log events."""
        self.checkpoints: list[LayerwiseCheckpoint] = []
        """Callbacks that save slices."""
        self.restarters: list[ElasticRestart] = []
        """Callbacks that can restart the run without some of its machines."""
        self.trained_at_first: dict[str, bool] | None = None
        """Whether each parameter trained when the first fit began; None before that."""
        self.has_joiners = True
        """Whether ranks have joined since the last generation, which may not reach the stores."""

    @property
    def comms(self) -> Communicators:
        """Small messages between all ranks; under strategies without plans, only this one."""
        if self.strategy is None:
            return Communicators(global_rank=0, world_size=1)
        return self.strategy.engine.comms

    @staticmethod
    def join(members: list[_T], member: _T) -> None:
        """Add a callback to one of the lists, unless it is in it."""
        if member not in members:
            members.append(member)


_OTHERS: WeakKeyDictionary[Strategy, Run] = WeakKeyDictionary()
"""The runs of strategies that have no `run` of their own."""


def run_of(trainer: pl.Trainer) -> Run:
    """Return the run in which a Trainer's callbacks find each other, under any strategy."""
    own = getattr(trainer.strategy, "run", None)
    return own if isinstance(own, Run) else _OTHERS.setdefault(trainer.strategy, Run())


def note(trainer: pl.Trainer, event: str, **fields: Any) -> None:
    """Write an event on rank 0, if the run keeps a log."""
    if trainer.is_global_zero:
        for log in run_of(trainer).logs:
            log.write(trainer, event, **fields)
