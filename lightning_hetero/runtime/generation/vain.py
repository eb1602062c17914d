"""Decide when to stop going on in place: a burst of losses ends, a recurring fault doesn't."""

import time
from collections.abc import Callable

__all__ = ["VainGenerations"]

_FEWEST = 3
_LONGEST_S = 60.0
"""About the time of a restart: after trying for as long, a restart costs at most as much again."""


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
        if self._count < _FEWEST or vain_s < _LONGEST_S:
            return ""
        return f"{self._count} generations in a row have trained no step, in {vain_s:.0f} s"
