"""The run: where its strategy, its callbacks and its ranks find each other."""

from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy

from lightning_hetero.core.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_hetero.callbacks import ElasticRestart, LayerwiseCheckpoint, RunLog
    from lightning_hetero.runtime.ranks.communicators import Communicators
    from lightning_hetero.strategy.hetero import HeteroStrategy

_T = TypeVar("_T")


class Run:
    """One run, through which its callbacks find each other: each adds itself in its `setup`.

    Args:
        strategy: The strategy, whose `run` it is.
    """

    def __init__(self, strategy: "HeteroStrategy") -> None:
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
    def comms(self) -> "Communicators":
        """Small messages between all ranks; available once the strategy has been set up."""
        return self.strategy.engine.comms

    @staticmethod
    def join(members: list[_T], member: _T) -> None:
        """Add a callback to one of the lists, unless it is in it."""
        if member not in members:
            members.append(member)


def run_of(trainer: pl.Trainer) -> Run:
    """Return the run in which a Trainer's callbacks find each other.

    Raises:
        ConfigurationError: The strategy isn't `HeteroStrategy`.
    """
    run = getattr(trainer.strategy, "run", None)
    if not isinstance(run, Run):
        raise ConfigurationError(
            "Callbacks of lightning_hetero (except RunLog and CollectGarbage) need HeteroStrategy, "
            f"also on one device; this is {type(trainer.strategy).__name__}. Give the Trainer "
            "strategy=HeteroStrategy(), or leave them out."
        )
    return run


_LOGS: WeakKeyDictionary[Strategy, list["RunLog"]] = WeakKeyDictionary()
"""The logs under strategies that have no `run`."""


def logs_of(trainer: pl.Trainer) -> list["RunLog"]:
    """Return the callbacks that log a Trainer's events, under any strategy."""
    run = getattr(trainer.strategy, "run", None)
    return run.logs if isinstance(run, Run) else _LOGS.setdefault(trainer.strategy, [])


def note(trainer: pl.Trainer, event: str, **fields: Any) -> None:
    """Write an event on rank 0, if the run keeps a log."""
    if trainer.is_global_zero:
        for log in logs_of(trainer):
            log.write(trainer, event, **fields)
