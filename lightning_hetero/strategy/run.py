"""The run: where its strategy, its callbacks and its ranks find each other."""

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy

from lightning_hetero.core.arrays import FloatArray
from lightning_hetero.runtime.ranks.communicators import Communicators, Rows

if TYPE_CHECKING:
    from lightning_hetero.callbacks import ElasticRestart, LayerwiseCheckpoint, RunLog
    from lightning_hetero.strategy.hetero import HeteroStrategy

_T = TypeVar("_T")


class RestoredState(Protocol):
    """A recovered state, of which this rank has its slices."""

    checkpoint: dict[str, Any]
    """The rest of the state, under Lightning's names for the entries of a checkpoint."""

    def load_weights(self) -> None:
        """Put weights and buffers into the module."""

    def load_optimizers(self) -> None:
        """Put the optimizers' state, and averages of weights, in place."""


@runtime_checkable
class OutlivesRanks(Protocol):
    """The options of `ElasticRestart` that are read before the processes connect."""

    in_place: bool
    """Whether to go on without lost ranks in the same processes."""
    heartbeat_timeout: timedelta
    """How long a rank may then show no heartbeat before it counts as lost."""
    replace_lost: bool
    """Whether a joiner is started on the device of a lost process."""


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
    def control(self) -> dist.ProcessGroup | None:
        """The group of small messages between all ranks; None for one rank, or without plans."""
        return None if self.strategy is None else self.strategy.engine.comms.control

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
        """Return the leader's numbers. Other ranks pass as many, which are ignored."""
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
