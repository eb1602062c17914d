"""Judge who is gone, being silent or late, and when it is in vain to go on without who is lost."""

import math
import time
from collections.abc import Callable, Collection

from torch.distributed.distributed_c10d import Store

from lightning_hetero.runtime.generation.records import tell_gone

__all__ = ["LOOK_S", "Judge", "Turns", "VainGenerations", "pause_s"]

LOOK_S = 0.01
"""Between two looks at who has come, of few members; they ask who is silent a fifth as often."""
_FEW, _MANY = 16, 100
"""Members that each take all turns; and members that together make the most short calls."""
_SELDOM = 200.0
"""Times as long as the first one that any member waits: 2 s for a look, 10 s until it asks."""
_FEWEST_IN_VAIN = 3
_LONGEST_IN_VAIN_S = 60.0
"""About the time of a restart: after trying for as long, a restart costs at most as much again."""


def pause_s(num_members: int) -> float:
    """Return the seconds between short calls of one of so many members that wait for something."""
    return LOOK_S * max(1.0, num_members / _MANY)


class Turns:
    """One member's turns at what costs the more, the more members there are.

    To look at who has come is to read a line for each member, and to ask who is silent is a call of
    the store for each of them; the store answers one call after another. So the first of those that
    are here takes most turns, the second half as many, and so on, and each goes on if those before
    it are lost: n members take about ln n times as many turns as the first one, instead of n times.
    In virtual time 1,024 members agree in 0.3 s, instead of 21 s.

    Args:
        every_s: Seconds between two turns of each of few members.
        num_members: How many there are.
    """

    def __init__(self, every_s: float, num_members: int) -> None:
        self._every_s, self._num_members = every_s, num_members
        self._last_s = -math.inf

    def is_next(self, place: int) -> bool:
        """Whether it is this member's turn, which begins the wait for the next one.

        Args:
            place: The number of members before it.
        """
        longer = min(max(1.0, (1 + place) * self._num_members / _FEW**2), _SELDOM)
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
        num_members: How many there are.
    """

    def __init__(
        self,
        store: Store,
        is_silent: Callable[[int], bool],
        *,
        patience_s: float,
        num_members: int,
    ) -> None:
        self._store, self._is_silent, self._patience_s = store, is_silent, patience_s
        self._deadline_s = time.monotonic() + patience_s
        self._asks = Turns(5 * LOOK_S, num_members)
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


class VainGenerations:
    """Counts generations in a row that ended before any step was trained, as one rank saw them.

    A count alone would end a run that loses spot machines one after another, each while the others
    still recover from the loss before. Time alone would end a run whose recovery is slow. So a run
    ends after several in a row *and* a minute without a step (ski rental).

    ::

        vain = VainGenerations()
        why = vain.note(has_trained=False)  # after a generation; says why the run should end

    Args:
        now_s: The time, in seconds.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._since_s = now_s()
        self._count = 0

    def note(self, *, has_trained: bool) -> str:
        """Note that a generation has ended; return why no other should follow, "" if one should."""
        if has_trained:
            self._since_s, self._count = self._now_s(), 0
            return ""
        self._count += 1
        vain_s = self._now_s() - self._since_s
        if self._count < _FEWEST_IN_VAIN or vain_s < _LONGEST_IN_VAIN_S:
            return ""
        return f"{self._count} generations in a row have trained no step, in {vain_s:.0f} s"
