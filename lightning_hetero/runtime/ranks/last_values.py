"""Give all ranks that are left the same values to act on, whichever rank is lost as it sends them.

Before a step ranks receive values on which each then acts alone: the rows of an agreement, the
square of all gradients' norm. Whoever is lost while they travel leaves ranks that have received
them, and step, beside ranks that haven't: then no step is left of which every row is known.

So each rank keeps the last values that it took. Once a rank is lost, each of the others *lays open*
what it took last, and takes nothing more from the broken communicators. A rank that lacks values
waits until all others have done so, and takes them from one that has them; if none has, all lack
them, and nobody steps. What a rank took before that can't be followed by another rank's next
values, which need its own: so nobody is ahead by more than one.

Costs nothing before a loss but a copy of the values (n rows of about 100 bytes), then one copy of
them in the store and one short entry for each rank. Values on an accelerator aren't taken so: the
host doesn't have them.
"""

import json
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from lightning_hetero.runtime.ranks.broken import is_broken_connection

__all__ = ["Board", "LastValues"]

_NOTHING = 0
"""Number of the last values of a rank that took none."""


class Board(Protocol):
    """Where ranks of a generation lay values open to each other, served by none of them."""

    def lay_open(self, number: int, values: str) -> None:
        """Show the others the number of what this rank took last, and the values."""

    def await_others(self) -> Iterable[tuple[int, str]]:
        """Wait until all ranks that are left have done so; return what the others showed."""


class LastValues:
    """One rank's values of one generation; all ranks make the same calls of `take`.

    ::

        last_values = LastValues(board)
        rows = last_values.take(lambda: tree.share(going_up))
        last_values.close()  # On a thread that sees a loss; then it aborts communicators.
    last_values.lay_open()

    Args:
        board: Where values are laid open.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._lock = threading.Lock()
        self._number = _NOTHING
        self._values = torch.empty(0)
        self._is_closed = self._is_open = False

    def take(self, receive: Callable[[], Tensor]) -> Tensor:
        """Return what a collective of all ranks gives every rank, or another rank's copy of it.

        Args:
            receive: Runs the collective; its result is float64, on the CPU.

        Raises:
            RuntimeError: The communicator is broken, and no rank that is left has the values.
        """
        number = self._number + 1
        try:
            values = receive()
        except RuntimeError as error:
            if not is_broken_connection(error):
                raise
            broken = error
        else:
            if self._keep(number, values):
                return values
            broken = RuntimeError("Connection closed by peer: another rank was lost.")
        self.lay_open()
        for others_number, data in self._board.await_others():
            if others_number == number:
                return torch.tensor(json.loads(data), dtype=torch.float64)
        raise broken

    def close(self) -> None:
        """Take no more from communicators; called before they are aborted, and waits for nobody."""
        with self._lock:
            self._is_closed = True

    def lay_open(self) -> None:
        """Show the others what this rank took last, once; it takes no more but what they have."""
        with self._lock:
            was_open, self._is_closed, self._is_open = self._is_open, True, True
        if not was_open:
            self._board.lay_open(self._number, json.dumps(self._values.tolist()))

    def _keep(self, number: int, values: Tensor) -> bool:
        """Keep values, unless this rank takes no more."""
        with self._lock:
            if not self._is_closed:
                self._number, self._values = number, values.clone()
            return not self._is_closed
