"""Wait for members of a run, and tell that those are gone that are silent or don't come."""

import math
import time
from collections.abc import Callable, Collection
from typing import Protocol

from torch.distributed.distributed_c10d import Store

from lightning_hetero.runtime.generation.records import tell_gone
from lightning_hetero.runtime.ranks.heartbeat import Silence

__all__ = ["POLL_S", "SignsOfLife", "Vigil", "silence_of"]

POLL_S = 0.01
"""Between two looks at who has come."""
_ASK_S = 0.05
"""Between two looks at who is silent, which is a call of the store for each of them."""


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
    """

    def __init__(self, store: Store, is_silent: Callable[[int], bool], patience_s: float) -> None:
        self._store, self._is_silent, self._patience_s = store, is_silent, patience_s
        self._deadline_s = time.monotonic() + patience_s
        self._asked_s = -math.inf

    def look(self, missing: Collection[int], here: Collection[int] = ()) -> None:
        """Tell who is gone: silent ones, and `missing` ones once there was enough time to come."""
        if time.monotonic() <= self._asked_s + _ASK_S:
            return
        self._asked_s = time.monotonic()
        for member in (*missing, *here):
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
