"""The process that keeps a worker: starts it, outlives it, and tells the others when it dies.

Launchers end or restart all processes when one of theirs ends. So the process that they start is a
keeper, and the real worker is its child: the launcher doesn't notice if a worker dies. With
`python -m lightning_hetero.keep` it is one from the start; else the process that begins the script
becomes one, by `exec` and with the same process id. A keeper

- starts its workers, which run the same script again; they die with it (`PR_SET_PDEATHSIG`),
- passes signals on to them,
- serves the store if it is rank 0's and torchrun's agent doesn't,
- tells the membership when a worker has died, and why; ends a worker that others have given up,
- starts a joiner on a lost worker's device, if the others go on and nobody has told it to end,
- ends when its workers and training have ended: with 0 if training was finished, else with a
  worker's exit code, for the launcher to act on.

It imports torch after its workers have started, and Lightning never. Linux only.
"""

import enum
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from lightning_hetero.core.process import allow_files

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = [
    "ALL_LEAVE",
    "BLOCKED",
    "JOIN",
    "KEPT",
    "Keeper",
    "Worker",
    "joiner_variables",
    "tell_keeper",
]

JOIN = "LIGHTNING_HETERO_JOIN"
"""Environment variable of a joiner: host:port of the store of the run that it is to join."""
KEPT = "LIGHTNING_HETERO_KEPT"
"""Variable of a worker's environment: where it tells its keeper which member of a run it is."""
ALL_LEAVE = 14
"""Exit code of all ranks of a run that have agreed to leave (`failure.LEAVE_EXIT_CODE`)."""
_LOOK_S = 0.2
"""How often it looks into the store."""
_FIRST_WAIT_S, _WAIT_FACTOR, _LONGEST_WAIT_S = 5.0, 4.0, 600.0
"""How long a device stays empty after a loss; losses older than six of the longest don't count."""
_ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_HANDED_ON = _ENDING | {signal.SIGUSR1, signal.SIGUSR2}
BLOCKED = _HANDED_ON | {signal.SIGCHLD, signal.SIGALRM}
"""Signals that a keeper's loop waits for; blocked before it has threads."""
_FROM_TERMINAL = 0x80
"""`si_code` of what the system itself sends: to the whole process group, so to workers as well."""


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
            recent_s = [item for item in self._ends_s if end_s - item < 6 * _LONGEST_WAIT_S]
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

    @property
    def is_due(self) -> bool:
        """Whether its device has been empty for as long as its losses call for.

        What breaks each of its workers costs all others a generation each time, so the wait grows:
        5 s, 20 s, 80 s, …, 10 minutes.
        """
        may_be_replaced = self.died_in_training or self.is_joiner
        if not self.is_lost or not may_be_replaced or self.is_replaced:
            return False
        wait_s = min(_FIRST_WAIT_S * _WAIT_FACTOR ** (len(self._ends_s) - 1), _LONGEST_WAIT_S)
        return time.monotonic() >= self._ends_s[-1] + wait_s

    def replaced(self, address: str) -> "Worker":
        """Start and return a joiner on its device; `address` is host:port of the run's store."""
        self.is_replaced = True
        return Worker(self._start, joiner_variables(address), self._ends_s)


class _Outlook(enum.Enum):
    """What the membership says of a run in which a worker has died."""

    GOES_ON = enum.auto()
    """Others go on."""
    ENDED = enum.auto()
    """Others have trained to the end."""
    OVER = enum.auto()
    """No member is left, or the store is gone."""


class Keeper:
    """See the module's docstring.

    Args:
        workers: The workers, started from the main thread.
        address: Host of the store.
        port: Port of the store.
        serves: Whether this keeper serves it.
        replaces: Whether joiners take the devices of lost workers.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        address: str,
        port: int,
        serves: bool,
        replaces: bool = False,
    ) -> None:
        self._workers = list(workers)
        """Of the first start, then those that took their devices."""
        self._address, self._port, self._serves = address, port, serves
        self._replaces = replaces
        self._is_told_to_end = False
        self._woken = threading.Event()
        self._seen: tuple[int, _Outlook | None] = (0, None)
        """The number of dead workers reported to the membership, and its answer."""

    def run(self) -> int:
        """Keep the workers until they have ended; return the exit code."""
        threading.Thread(target=self._watch_store, name="keeper-store", daemon=True).start()
        signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
        while True:
            # Not `sigtimedwait`, which tells of a signal that never was, in memory that nobody has
            # written to, if this process is stopped and goes on after the timeout.
            received = signal.sigwaitinfo(BLOCKED)
            if received.si_signo in _HANDED_ON:
                if received.si_code != _FROM_TERMINAL:
                    self._hand_on(received.si_signo)
                self._is_told_to_end |= received.si_signo in _ENDING
                continue
            for worker in self._workers:
                worker.look()
            self._replace_lost()
            self._woken.set()
            code = self._judge()
            if code is not None:
                return code

    def _hand_on(self, number: int) -> None:
        for worker in self._workers:
            worker.signal(number)

    def _replace_lost(self) -> None:
        """Start joiners on the devices of lost workers, if their time has come."""
        _, outlook = self._seen
        is_over = outlook in (_Outlook.ENDED, _Outlook.OVER)
        if is_over or self._is_told_to_end or not self._replaces:
            return
        for worker in [worker for worker in self._workers if worker.is_due]:
            joiner = worker.replaced(f"{self._address}:{self._port}")
            # However often a device loses its worker, the first one and the latest are kept.
            stay = [item for item in self._workers if item.is_first or item is not worker]
            self._workers = [*stay, joiner]
            text = f"process {joiner.pid} joins the run on the device of process {worker.pid}"
            sys.stderr.write(f"lightning_hetero: {text}, which was lost.\n")
            sys.stderr.flush()

    def _judge(self) -> int | None:
        """Return this keeper's exit code; None while it has to stay."""
        dead = self._dead()
        for worker in dead:
            if worker.member is None and not worker.is_joiner:
                # It wasn't a member yet, and the run can't begin without it.
                return worker.code
        if self._has_members():
            return None
        if any(worker.code == ALL_LEAVE for worker in self._workers):
            return ALL_LEAVE  # Those too whose workers were lost before: nobody goes on.
        if not dead:
            return max(worker.code or 0 for worker in self._workers)
        num_told, outlook = self._seen
        if num_told < len(dead) or outlook is None:
            return None
        if outlook is _Outlook.GOES_ON and (self._serves or not self._is_told_to_end):
            return None
        # Joiners that the run hasn't let in end with this process.
        # What failed after training is the script's failure, whoever was lost before.
        failed = min(dead, key=lambda worker: worker.died_in_training is not False)
        return 0 if outlook is _Outlook.ENDED else failed.code

    def _dead(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.is_lost]

    def _has_members(self) -> bool:
        """Whether a worker lives for which this process stays, whatever becomes of the run."""
        return any(worker.code is None and not worker.is_joiner for worker in self._workers)

    # -- the thread that waits for the store ------------------------------------------------------

    def _watch_store(self) -> None:
        """Serve the store, or connect to it; report dead workers, and end those given up."""
        from datetime import timedelta

        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # Every member of the run is a client of the store, several times over.
        allow_files(os.getpid() if self._serves else os.getppid())
        try:
            store = TCPStore(
                self._address,
                self._port,
                is_master=self._serves,
                wait_for_workers=False,
                timeout=timedelta(minutes=10),
            )
            while True:
                self._woken.wait()
                self._woken.clear()
                self._look(store)
        except Exception:
            # The client's own errors have many types. The run ends with the store.
            self._seen = len(self._workers), _Outlook.OVER

    def _look(self, store: "Store") -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        from lightning_hetero.runtime.generation import joiners, records

        dead = self._dead()
        # The dead first: others wait for that word.
        for worker in sorted(self._workers, key=lambda item: item not in dead):
            if worker.member is None:
                continue
            prefix, number = worker.member
            of_run = PrefixStore(prefix, store)
            if worker.is_joiner and not joiners.has_never_entered(of_run, number):
                worker.is_joiner = False
            if worker.code is None:
                if records.reason_of(of_run, number) is not None:
                    # The others have given it up, and it hasn't noticed.
                    worker.signal(signal.SIGKILL)
            elif worker in dead and worker.died_in_training is None:
                worker.died_in_training = not of_run.check([records.ENDED])
                records.tell_gone(of_run, number, worker.describe_end())
        self._seen = len(dead), None if self._has_members() else self._outlook(store, dead)

    def _outlook(self, store: "Store", dead: Sequence[Worker]) -> _Outlook | None:
        """Return what the membership says of the run of dead workers; None if they had none."""
        from torch.distributed.distributed_c10d import PrefixStore

        from lightning_hetero.runtime.generation import joiners, records

        outlooks = set()
        for worker in dead:
            if worker.member is None or worker.is_joiner:
                continue
            prefix, number = worker.member
            of_run = PrefixStore(prefix, store)
            outlook = _Outlook.OVER
            if joiners.has_never_entered(of_run, number):
                # The run is none of its own: whoever started it hears at once that it failed.
                pass
            elif of_run.check([records.ENDED]):
                # What fails after training, in code that follows, is a failure of the script.
                outlook = _Outlook.ENDED if worker.died_in_training else _Outlook.OVER
            elif records.is_anybody_left(of_run):
                outlook = _Outlook.GOES_ON
            outlooks.add(outlook)
        # Where one worker's end is a failure, so is this process's.
        return max(outlooks, key=lambda outlook: outlook.value, default=None)


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
