"""The process that keeps a worker: starts it, outlives it, and tells the others when it dies.

A launcher such as torchrun ends or restarts all its processes when one of them ends. So the process
that it starts becomes a *keeper*, and the real worker is the keeper's child: the launcher doesn't
notice if a worker dies. A process that was started by `python -m lightning_hetero.keep` is a keeper
from the beginning. Otherwise the process that runs the script becomes one at its first `fit`, by
`exec`, with the same process id. A keeper

- starts its workers, which run the script from its beginning and die with the keeper
  (`PR_SET_PDEATHSIG`),
- passes signals on to them,
- serves the store, if it is rank 0's keeper and torchrun's agent doesn't serve it,
- records in the membership that a worker has died, and why, and kills a worker that the other
  members count as gone,
- starts a joiner on a lost worker's device, if the others go on and the keeper hasn't been told to
  end,
- ends when its workers and training have ended: with exit code 0 if training was finished, else
  with a worker's exit code, on which the launcher can act.

It imports torch only after its workers have started, and never imports Lightning. Linux only.
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

    from lightning_hetero.runtime.generation.log import Log

JOIN = "LIGHTNING_HETERO_JOIN"
"""Environment variable of a joiner: host:port of the store of the run to join."""
KEPT = "LIGHTNING_HETERO_KEPT"
"""Environment variable of a worker: where it tells its keeper which member of a run it is."""
ALL_LEAVE = 14
"""Exit code of all ranks of a run if they have agreed to leave (`failure.LEAVE_EXIT_CODE`)."""
_LOOK_S = 0.2
"""Seconds between two reads of the store."""
_FIRST_WAIT_S, _WAIT_FACTOR, _LONGEST_WAIT_S = 5.0, 4.0, 600.0
"""Seconds before the next process is started on a device after its n-th loss: 5·4ⁿ⁻¹, at most 600.
Losses more than an hour ago don't count."""
_ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_HANDED_ON = _ENDING | {signal.SIGUSR1, signal.SIGUSR2}
BLOCKED = _HANDED_ON | {signal.SIGCHLD, signal.SIGALRM}
"""Signals that a keeper's loop waits for; they are blocked before it has threads."""
_FROM_TERMINAL = 0x80
"""`si_code` of signals from the system itself. Workers get these, too, since they go to the whole
process group."""


def joiner_variables(address: str) -> dict[str, str]:
    """Return the variables that a joiner's environment has besides those of the first workers.

    They keep a joiner from acting as rank 0 before it has a rank.

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
        start: Starts it and returns its process id. Its arguments are environment variables that
            are added to this process's, and a file descriptor that the worker inherits.
        more: Further variables of its environment.
        ends_s: The times at which earlier workers on its device ended, ascending.
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
        """The prefix of its membership, and its number as a member; None until it has reported
        them."""
        self.died_in_training: bool | None = None
        """Whether it died before training had ended; None until the membership knows."""
        self.is_first = not ends_s
        """Whether it is a worker of the first start."""
        self.is_joiner = not self.is_first
        """Whether it was started on a lost worker's device and isn't known to have joined yet."""
        self.is_replaced = False
        """Whether another worker was started on its device."""

    def look(self) -> None:
        """Check whether it has ended, and read which member it says it is; called by one thread."""
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
        """Whether it was lost: it ended neither by itself nor together with all others."""
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
        """Whether its device has waited long enough since its last loss for another process.

        Each new loss costs all other ranks a change of generation, so a fault that kills each
        worker on a device must not recur often: 5 s, 20 s, 80 s, …, 10 minutes.
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
    """What the membership says about a run in which a worker has died."""

    GOES_ON = enum.auto()
    """Others go on."""
    ENDED = enum.auto()
    """Others have trained to the end."""
    OVER = enum.auto()
    """No member is left, or the store is gone."""


class Keeper:
    """The keeper of a node's workers; see the module's docstring.

    Args:
        workers: The workers, which the main thread has started.
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
        """The workers of the first start, then those started in place of lost ones."""
        self._address, self._port, self._serves = address, port, serves
        self._replaces = replaces
        self._is_told_to_end = False
        self._woken = threading.Event()
        self._logs: dict[str, Log] = {}
        """The logs of the workers' memberships, by prefix."""
        self._seen: tuple[int, _Outlook | None] = (0, None)
        """The number of dead workers reported to the membership, and its answer."""

    def run(self) -> int:
        """Keep the workers until they have ended; return the exit code."""
        threading.Thread(target=self._watch_store, name="keeper-store", daemon=True).start()
        signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
        while True:
            # Not `sigtimedwait`: if this process is stopped and continues after the timeout, that
            # returns a signal that was never sent, from uninitialised memory.
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
        """Start joiners on the devices of lost workers whose waiting time is over."""
        _, outlook = self._seen
        is_over = outlook in (_Outlook.ENDED, _Outlook.OVER)
        if is_over or self._is_told_to_end or not self._replaces:
            return
        for worker in [worker for worker in self._workers if worker.is_due]:
            joiner = worker.replaced(f"{self._address}:{self._port}")
            # Of the workers on a device, remember only the first and the latest, however many are
            # lost.
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
                # It wasn't a member yet, so the run can't begin without it.
                return worker.code
        if self._has_members():
            return None
        if any(worker.code == ALL_LEAVE for worker in self._workers):
            return ALL_LEAVE  # Even if its own workers were lost before: nobody goes on.
        if not dead:
            return max(worker.code or 0 for worker in self._workers)
        num_told, outlook = self._seen
        if num_told < len(dead) or outlook is None:
            return None
        if outlook is _Outlook.GOES_ON and (self._serves or not self._is_told_to_end):
            return None
        # Joiners that weren't admitted end with this process. If code after training has failed,
        # the script has failed, whichever workers were lost before.
        failed = min(dead, key=lambda worker: worker.died_in_training is not False)
        return 0 if outlook is _Outlook.ENDED else failed.code

    def _dead(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.is_lost]

    def _has_members(self) -> bool:
        """Whether a worker is alive that must be waited for, whatever happens to the run."""
        return any(worker.code is None and not worker.is_joiner for worker in self._workers)

    # -- the thread that waits for the store ------------------------------------------------------

    def _watch_store(self) -> None:
        """Serve the store, or connect to it; report dead workers, and end those given up."""
        from datetime import timedelta

        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # Every member of the run has several connections to the store.
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
        dead = self._dead()
        # Report the dead first: others wait for that.
        for worker in sorted(self._workers, key=lambda item: item not in dead):
            if worker.member is None:
                continue
            prefix, number = worker.member
            log = self._log_of(store, prefix)
            state = log.read()
            worker.is_joiner &= not state.took_in(number)
            if worker.code is None:
                if number in state.gone:
                    # The other members count it as gone, and it hasn't noticed.
                    worker.signal(signal.SIGKILL)
            elif worker in dead and worker.died_in_training is None:
                worker.died_in_training = not state.ended
                log.note("gone", number, worker.describe_end())
        self._seen = len(dead), None if self._has_members() else self._outlook(store, dead)

    def _log_of(self, store: "Store", prefix: str) -> "Log":
        from torch.distributed.distributed_c10d import PrefixStore

        from lightning_hetero.runtime.generation.log import Log

        if prefix not in self._logs:
            self._logs[prefix] = Log(PrefixStore(prefix, store))
        return self._logs[prefix]

    def _outlook(self, store: "Store", dead: Sequence[Worker]) -> _Outlook | None:
        """Return what the membership says about the run of dead workers; None if there are none."""
        outlooks = set()
        for worker in dead:
            if worker.member is None or worker.is_joiner:
                continue
            prefix, number = worker.member
            state, outlook = self._log_of(store, prefix).read(), _Outlook.OVER
            # A joiner of a run that others keep may never have been in: whoever started it should
            # learn at once that it failed. If code that follows training fails, the script has.
            if state.took_in(number):
                if state.ended and worker.died_in_training:
                    outlook = _Outlook.ENDED
                elif not state.ended and state.is_anybody_left:
                    outlook = _Outlook.GOES_ON
            outlooks.add(outlook)
        # If the end of one worker is a failure, so is the end of this process.
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
