"""What of the data a run has consumed: saved with checkpoints, read by any other topology."""

from collections.abc import Mapping
from typing import Any

from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.data.order import Cursor

__all__ = ["Progress"]


class Progress:
    """The cursor of a run, and the order that it counts in.

    Args:
        identity: What the order depends on, such as its seed; a state saved under another order
            is refused, since what it has consumed would be other samples.
    """

    def __init__(self, **identity: int | bool) -> None:
        self._identity = identity
        self.cursor = Cursor()
        """What is handed out, up to and including the last iteration."""

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless it has begun."""
        if epoch != self.cursor.epoch:
            self.cursor = Cursor(epoch=epoch)

    def end_epoch(self) -> None:
        """Go on to the next epoch."""
        self.cursor = Cursor(epoch=self.cursor.epoch + 1)

    def state_dict(self, cursor: Cursor | None = None) -> dict[str, Any]:
        """Return the cursor, or another one of the same order, as plain data."""
        return {"order": dict(self._identity), "cursor": (cursor or self.cursor).to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was saved.

        Raises:
            CheckpointError: It was saved under another order, or is none of ours.
        """
        found = state.get("order")
        if found != self._identity:
            raise CheckpointError(
                f"The data's position was saved for the order {found} but the order is "
                f"{self._identity} now, so samples would be lost or come twice. Give the same "
                "seed, dataset and context_length, or start without the old position."
            )
        self.cursor = Cursor.from_dict(state.get("cursor"))
