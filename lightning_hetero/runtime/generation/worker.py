"""A worker process as its keeper knows it, and the joiner that takes its device when it is lost.

Nothing here imports torch: a keeper starts its workers before that.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

__all__ = ["ALL_LEAVE", "JOIN", "KEPT", "Worker", "joiner_variables", "tell_keeper"]

JOIN = "LIGHTNING_HETERO_JOIN"
"""Environment variable of a joiner: host:port of the store of the run that it is to join."""
KEPT = "LIGHTNING_HETERO_KEPT"
"""Variable of a worker's environment: where it tells its keeper which member of a run it is."""
ALL_LEAVE = 14
"""Exit code of all ranks of a run that have agreed to leave (`failure.LEAVE_EXIT_CODE`)."""
_FIRST_WAIT_S, _WAIT_FACTOR, _LONGEST_WAIT_S = 5.0, 4.0, 600.0
_FORGOTTEN_S = 3600.0


def joiner_variables(address: str) -> dict[str, str]:
    """Return what the environment of a joiner has besides that of a worker of the first start.

    It does none of rank 0's work before it has a rank.

    Args:
        address: host:port of the run's store.
    """
    more = {JOIN: address, "NODE_RANK": "1"}
    if os.environ.get("RANK", "0") == "0":
        more["RANK"] = "1"
    if os.environ.get("SLURM_PROCID") == "0":
        more["SLURM_PROCID"] = "1"
    return more


def _wait_before_replacing_s(num_lost: int) -> float:
    """Return how long a device stays empty after it has lost its worker.

    What breaks each of its workers costs all others a generation each time, so the wait grows:
    5 s, 20 s, 80 s, …, 10 minutes.

    Args:
        num_lost: Workers that it has lost within an hour.
    """
    return float(min(_FIRST_WAIT_S * _WAIT_FACTOR ** (num_lost - 1), _LONGEST_WAIT_S))


class Worker:
    """A worker process, and what its keeper knows of it.

    Args:
        start: Starts it: returns its process id, given the variables that its environment has
            besides this process's, and a descriptor that it inherits.
        more: Further variables of its environment.
        ends_s: When those that had its device before it have ended, the latest last.
    """

    def __init__(
        self,
        start: Callable[[dict[str, str], int], int],
        more: Mapping[str, str] | None = None,
        ends_s: Sequence[float] = (),
    ) -> None:
        self._start = start
        self._ends_s = ends_s
        self._told, write = os.pipe()
        os.set_blocking(self._told, False)
        self.pid = start({**(more or {}), KEPT: str(write)}, write)
        os.close(write)
        self._status: int | None = None
        self.member: tuple[str, int] | None = None
        """The prefix of its membership, and its number; None until it has told."""
        self.died_in_training: bool | None = None
        """Whether it died before training had ended; None until the membership has been told."""
        self.is_first = not ends_s
        """Whether it is of the first start."""
        self.is_joiner = not self.is_first
        """Whether it took a lost one's device, and the run, as far as known, hasn't let it in."""
        self.is_replaced = False
        """Whether another one has its device."""

    def look(self) -> None:
        """Check whether it has ended, and read what it has told; called by one thread only."""
        if self._status is not None:
            return
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        with suppress(BlockingIOError):
            lines = os.read(self._told, 65536).splitlines()
            if lines:
                prefix, number = json.loads(lines[-1])
                self.member = prefix, number
        if pid:
            os.close(self._told)
            end_s = time.monotonic()
            recent_s = [item for item in self._ends_s if end_s - item < _FORGOTTEN_S]
            self._ends_s, self._status = [*recent_s, end_s], status

    @property
    def code(self) -> int | None:
        """Its exit code, 128 + n where signal n has ended it; None while it runs."""
        if self._status is None:
            return None
        code = os.waitstatus_to_exitcode(self._status)
        return code if code >= 0 else 128 - code

    @property
    def is_lost(self) -> bool:
        """Whether it has ended, but neither by itself nor together with all others."""
        return self.code not in (None, 0, ALL_LEAVE)

    def signal(self, number: int) -> None:
        """Send it a signal if it runs."""
        if self._status is None:
            os.kill(self.pid, number)

    def describe_end(self) -> str:
        """Say how it has ended."""
        assert self._status is not None
        code = os.waitstatus_to_exitcode(self._status)
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return f"Its process {self.pid} ended with {how}."

    def note_entry(self) -> None:
        """Note that the run has let it in."""
        self.is_joiner = False

    def note_death(self, *, in_training: bool) -> None:
        """Note that the membership has been told of its end."""
        self.died_in_training = in_training

    @property
    def is_due(self) -> bool:
        """Whether its device has been empty for as long as its losses call for."""
        may_be_replaced = self.died_in_training or self.is_joiner
        if not self.is_lost or not may_be_replaced or self.is_replaced:
            return False
        return time.monotonic() >= self._ends_s[-1] + _wait_before_replacing_s(len(self._ends_s))

    def replaced(self, address: str) -> "Worker":
        """Start and return a joiner on its device.

        Args:
            address: host:port of the store of the run, which it joins.
        """
        self.is_replaced = True
        return Worker(self._start, joiner_variables(address), self._ends_s)


def tell_keeper(prefix: str, number: int) -> None:
    """Tell this worker's keeper, if it has one, which member it is.

    Args:
        prefix: The membership's prefix in the store.
        number: The member's number.
    """
    descriptor = int(os.environ.get(KEPT, "-1"))
    if descriptor >= 0:
        with suppress(OSError):
            os.write(descriptor, json.dumps([prefix, number]).encode() + b"\n")
