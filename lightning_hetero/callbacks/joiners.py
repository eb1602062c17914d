"""Decide, on rank 0, after which step waiting joiners may join."""

import lightning.pytorch as pl

from lightning_hetero.callbacks.checkpointing.training_state import is_epoch_ending
from lightning_hetero.callbacks.run import run_of
from lightning_hetero.checkpoint import SavedCheckpoint
from lightning_hetero.core.errors import CheckpointError, PeerError

__all__ = ["JoinersOfRun"]


class JoinersOfRun:
    """The joiners that rank 0 sees waiting; other ranks see none.

    ::

        joiners = JoinersOfRun()
        if joiners.may_come_in(trainer, newest=saved):  # before each iteration
            ...  # save after this step, and let them in
    """

    def __init__(self) -> None:
        self._unsafe: SavedCheckpoint | None = None
        self._are_held_back = False

    def refuse_after(self, saved: SavedCheckpoint) -> None:
        """Let nobody in until a later save is confirmed: `saved`, for joiners, has failed."""
        self._unsafe = saved

    def may_come_in(self, trainer: pl.Trainer, newest: SavedCheckpoint | None) -> bool:
        """Whether joiners are waiting that may join after this step.

        They may not after the last step of an epoch, since a checkpoint from before the epoch's end
        would lack what that end changes; a step later they may, even if that ends an epoch, too.

        Args:
            trainer: The Trainer, whose iteration begins.
            newest: The last checkpoint that was started.
        """
        strategy = run_of(trainer).strategy
        waits = False
        if strategy is not None and trainer.is_global_zero and strategy.processes.membership:
            waits = strategy.processes.membership.look_for_joiners()
        self._are_held_back = waits and not self._are_held_back and is_epoch_ending(trainer)
        return waits and not self._are_held_back and self._can_be_saved_for(newest)

    def _can_be_saved_for(self, newest: SavedCheckpoint | None) -> bool:
        if self._unsafe is not None and newest is not self._unsafe and _is_confirmed(newest):
            self._unsafe = None
        return self._unsafe is None


def _is_confirmed(saved: SavedCheckpoint | None) -> bool:
    if saved is None:
        return False
    try:
        saved.wait_until_confirmed(0.0)
    except (CheckpointError, PeerError, OSError):
        return False
    return True
