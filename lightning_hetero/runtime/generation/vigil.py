"""Wait for members of a run, and tell that those are gone that are silent or don't come."""

import math
import time
from collections.abc import Callable, Collection
from typing import Protocol

from torch.distributed.distributed_c10d import Store

from lightning_hetero.runtime.generation.records import tell_gone
from lightning_hetero.runtime.ranks.heartbeat import Silence

__all__ = ["LOOK_S", "SignsOfLife", "Turns", "Vigil", "pause_s", "silence_of"]

LOOK_S = 0.01
"""Between two looks at who has come, of few members."""
_ASK_S = 0.05
"""Between two times in which one of few members asks who is silent."""
_FEW, _MANY = 16, 100
"""Members that each take all turns; and members that together make the most short calls."""
_SELDOM = 200.0
"""Times as long as the first one that any member waits: 2 s for a look, 10 s until it asks."""


def pause_s(num_members: int) -> float:
    """Return the seconds between short calls of one of so many members that wait for something."""
    return LOOK_S * max(1.0, num_members / _MANY)


class Turns:
    """One member's turns at what costs the more, the more members there are.

    To look at who has come is to read a line for each member, and to ask who is silent is a call of
    the store for each of them. The store answers one call after another: if all of many members
    took turns alike, none would be answered in time. So the first of those that are here takes most
    turns, the second half as many, and so on, and each goes on if those before it are lost. Of n
    members all together take about ln n times as many turns as the first one, instead of n times.

    Counted in virtual time, with a store that answers 50,000 calls a second: 1,024 members agree in
    0.3 s and 11,000 calls, instead of 21 s and a million; if four of them are frozen, 1.1 s after
    the limit of 2 s. See `tests/runtime/generation/test_many_members.py`.

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


class SignsOfLife(Protocol):
    """News of a generation's ranks from its heartbeat; see `Heartbeat`."""

    def beats_of(self, global_rank: int) -> int:
        """Return the number of a rank's heartbeats so far."""

    def silence_since(self, global_rank: int, beats: int) -> float:
        """Return the seconds for which a rank was seen to be silent after `beats` heartbeats."""


class Vigil:
    """One wait for members, from its making on.

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
        self._asks = Turns(_ASK_S, num_members)
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


def silence_of(
    beats_of: Callable[[int], int],
    known_s: Callable[[int, int], float],
    *,
    limit_s: float,
    nap_s: float,
) -> Callable[[int], bool]:
    """Return a function that tells whether a rank has sent no heartbeat for `limit_s` of watching.

    Args:
        beats_of: Returns the number of a rank's heartbeats.
        known_s: Returns the seconds for which a rank was seen to be silent since that many.
        limit_s: Seconds of silence that are too many.
        nap_s: The most that a gap between two looks counts; see `Silence`.
    """
    watched: dict[int, Silence] = {}

    def is_silent(rank: int) -> bool:
        beats = beats_of(rank)
        if rank not in watched:
            watched[rank] = Silence(nap_s, sign=beats, seconds=known_s(rank, beats))
        return watched[rank].look(beats) > limit_s

    return is_silent
