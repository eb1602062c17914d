"""Deadlines: the one way in which anything here waits no longer than it may.

A wait ends once nothing has moved for the seconds that whoever waits allows, in the end the user's
`timeout`. Where progress can be seen, it counts from the last progress.
"""

import time
from concurrent.futures import Future, wait
from typing import Any

__all__ = ["Deadline", "Progress"]


class Progress:
    """Counts a thread's progress, for code that waits for it."""

    def __init__(self) -> None:
        self.count = 0
        self.is_given_up = False
        """Whether nobody waits for the work any more."""
        self.part_of: Progress | None = None
        """Larger work, whose progress ticks whenever this one does."""

    def tick(self) -> None:
        """Note some progress."""
        self.count += 1
        if self.part_of is not None:
            self.part_of.tick()

    def give_up(self) -> None:
        """Note that nobody waits for the work any more."""
        self.is_given_up = True

    def refuse_if_late(self) -> None:
        """Raise TimeoutError if nobody waits any more: late work could undo newer work."""
        if self.is_given_up:
            raise TimeoutError("This came too late.")


class Deadline:
    """Is over once there has been no progress for `timeout_s` seconds.

    Args:
        timeout_s: The seconds.
        progress: The progress; without it `renew` tells of it.
    """

    def __init__(self, timeout_s: float, progress: Progress | None = None) -> None:
        self._progress = progress or Progress()
        self._timeout_s = timeout_s
        self._seen = self._progress.count
        self._since_s = time.monotonic()

    def renew(self) -> None:
        """Note some progress."""
        self._progress.tick()

    @property
    def is_over(self) -> bool:
        """Whether there has been no progress for too long, as far as earlier calls have seen."""
        now_s = time.monotonic()
        if self._progress.count != self._seen:
            self._seen, self._since_s = self._progress.count, now_s
        return now_s - self._since_s > self._timeout_s

    def wait_for(self, future: "Future[Any]") -> None:
        """Wait until a job has ended, successfully or not.

        Raises:
            TimeoutError: There has been no progress for too long.
        """
        while not wait([future], timeout=min(1.0, self._timeout_s)).done:
            if self.is_over:
                raise TimeoutError(f"Nothing has moved for {self._timeout_s:g} s.")
