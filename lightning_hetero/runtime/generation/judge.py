"""Judge who is gone, being silent or late."""

import math
import time
from collections.abc import Callable, Collection

from torch.distributed.distributed_c10d import Store

from lightning_hetero.runtime.generation.records import tell_gone

__all__ = ["LOOK_S", "Judge", "Turns", "pause_s"]

LOOK_S = 0.01
"""Between two looks at who has come, of few members; they ask who is silent a fifth as often."""
_FEW, _MANY = 16, 100
"""Members that take turns often; and members that together make the most short calls."""
_SELDOM = 50.0
"""Times as long as these that any other member waits: 0.5 s for a look, 2.5 s until it asks."""


def pause_s(num_members: int) -> float:
    """Return the seconds between short calls of one of so many members that wait for something."""
    return LOOK_S * max(1.0, num_members / _MANY)


class Turns:
    """One member's turns at what costs the more, the more members there are.

    To look at who has come is to read a line for each member, and to ask who is silent is a call of
    the store for each of them; the store answers one call after another. So the first few of those
    that are here take turns often, and the others, who go on if these are lost, seldom.

    Args:
        every_s: Seconds between two turns of each of few members.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last_s = -math.inf

    def is_next(self, place: int) -> bool:
        """Whether it is this member's turn, which begins the wait for the next one.

        Args:
            place: The number of members before it.
        """
        longer = 1.0 if place < _FEW else _SELDOM
        is_due = time.monotonic() > self._last_s + self._every_s * longer
        if is_due:
            self._last_s = time.monotonic()
        return is_due


class Judge:
    """Judges members during one wait for them, from its making on.

    Args:
        store: The membership's store.
        is_silent: Tells whether a member has shown no sign of life for too long.
        patience_s: How long members may take to come while they are alive.
    """

    def __init__(
        self, store: Store, is_silent: Callable[[int], bool], *, patience_s: float
    ) -> None:
        self._store, self._is_silent, self._patience_s = store, is_silent, patience_s
        self._deadline_s = time.monotonic() + patience_s
        self._asks = Turns(5 * LOOK_S)
        self._asks.is_next(0)  # Most waits are over before anybody needs to ask.

    def look(self, missing: Collection[int], here: Collection[int] = (), *, place: int = 0) -> None:
        """Tell who is gone: silent ones, and `missing` ones once there was enough time to come.

        Members at a later `place` (see `Turns`) ask less often.
        """
        if not self._asks.is_next(place):
            return
        # Once nobody is missing any more, all that are here go on together, frozen ones as well.
        for member in (*here, *missing):
            if self._is_silent(member):
                tell_gone(self._store, member, "It showed no sign of life.")
            elif member in missing and time.monotonic() > self._deadline_s:
                why = f"It didn't come within {self._patience_s:.0f} s."
                tell_gone(self._store, member, why)
