"""The run: where its strategy and its callbacks find each other."""

from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import lightning.pytorch as pl
import torch.distributed as dist

if TYPE_CHECKING:
    from lightning_hetero.checkpoint import SavedCheckpoint
    from lightning_hetero.strategy.hetero import HeteroStrategy

__all__ = ["KeepsLog", "OutlivesRanks", "RestartsRun", "Run", "SavesSlices"]

_T = TypeVar("_T")


class KeepsLog(Protocol):
    """The part of `RunLog` that serves others."""

    def write(self, trainer: pl.Trainer, event: str, **fields: Any) -> None:
        """Append an event."""

    def file(self, trainer: pl.Trainer) -> Path:
        """Return where the log of a Trainer's run is."""


class SavesSlices(Protocol):
    """The part of `LayerwiseCheckpoint` that serves others."""

    saved: "SavedCheckpoint | None"

    @property
    def node_of_rank(self) -> tuple[str, ...]:
        """Name of each rank's node."""

    def save_and_leave(
        self, nodes: Collection[str], then: "Callable[[Callable[[], SavedCheckpoint]], None]"
    ) -> None:
        """When this step ends, call `then` with what saves it."""

    def can_go_on_live(self, trainer: pl.Trainer, leaving: Collection[int]) -> bool:
        """Whether the last step is held here, and every row of it by some rank not `leaving`."""

    def keep_live(self, trainer: pl.Trainer, generation: int) -> bool:
        """Hold on to this rank's part of the last step's state, since the generation has ended.

        Returns:
            Whether it holds on to anything.
        """


class RestartsRun(Protocol):
    """The part of `ElasticRestart` that serves others."""

    in_place: bool
    """Whether the others go on in their processes."""

    def num_left(self, exclude: Sequence[int]) -> int:
        """Return how many ranks a restart without some would have."""

    def request_restart(self, reason: str, *, exclude: Sequence[int]) -> None:
        """Leave with a checkpoint, for good where one of these ranks runs."""


@runtime_checkable
class OutlivesRanks(Protocol):
    """The options of `ElasticRestart` that count before anything has begun."""

    in_place: bool
    """Whether to go on without lost ranks in the same processes."""
    heartbeat_timeout: timedelta
    """How late a rank's heartbeat may be then."""


class Run:
    """One run, in which callbacks find each other; they say who they are in their `setup`.

    `HeteroStrategy.run`; under another strategy one without a `strategy`.

    Args:
        strategy: Whose plan may change; None under strategies without plans.
    """

    def __init__(self, strategy: "HeteroStrategy | None" = None) -> None:
        self.strategy = strategy
        self.logs: list[KeepsLog] = []
        """Who writes down what happens."""
        self.checkpoints: list[SavesSlices] = []
        """Who saves slices."""
        self.restarters: list[RestartsRun] = []
        """Who can restart the run without some of its machines."""
        self.knows_all_ranks = False
        """Whether all ranks were in the generation before: then its stores need no probe again."""
        self.begin_change: Callable[[], None] | None = None
        """Called when an optimizer is about to change the slices, after all that ranks wait for."""
        self.restart_s: float | None = None
        """Seconds from the last step before the newest restart to the state being back; or before
        the newest change of ranks in place, where whoever restarts the run does so in place."""

    @property
    def control(self) -> dist.ProcessGroup | None:
        """The group of small messages between all ranks; None for one rank, or without plans."""
        return None if self.strategy is None else self.strategy.engine.comms.control

    def note_restart(self, seconds: float | None, *, in_place: bool) -> None:
        """Count what a start has cost if a restart that somebody asks for would cost the same."""
        if in_place == any(item.in_place for item in self.restarters):
            self.restart_s = seconds

    @staticmethod
    def join(members: list[_T], member: _T) -> None:
        """Be found among others of its kind, once."""
        if member not in members:
            members.append(member)
