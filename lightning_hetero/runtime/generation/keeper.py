"""The process that keeps a worker: starts it, outlives it, and tells the others when it dies.

Launchers end or restart all processes when one of theirs ends. So the process that they start
becomes a keeper, by `exec` and with the same process id, and the real worker is its child: the
launcher doesn't notice if a worker dies. A keeper

- starts its workers, which run the same script again; they die with it (`PR_SET_PDEATHSIG`),
- passes signals on to them,
- serves the store if it is rank 0's and torchrun's agent doesn't,
- tells the membership when a worker has died, and why; ends a worker that others have given up,
- ends when its workers and training have ended: with 0 if training was finished, else with a
  worker's exit code, for the launcher to act on.

It imports torch after its workers have started, and Lightning never. Linux only.
"""

import ctypes
import enum
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = [
    "KEPT",
    "Keeper",
    "KeeperTask",
    "Worker",
    "be_kept",
    "become_keeper",
    "block_signals",
    "main",
    "tell_keeper",
]

KEPT = "LIGHTNING_HETERO_KEPT"
"""Variable of a worker's environment: where it tells its keeper which member of a run it is."""
_TASK = "LIGHTNING_HETERO_KEEPER"
_LOOK_S = 0.2
"""How often it looks into the store."""
_LOOK_AT_RUN_S = 2.0
"""How often once all its workers have died: each loss that a run survives leaves such a keeper."""
_HANDED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_BLOCKED = _HANDED_ON | {signal.SIGCHLD, signal.SIGALRM}
_FROM_TERMINAL = 0x80
"""`si_code` of what the system itself sends: to the whole process group, so to workers as well."""
_AT_ONCE = {0, 14}
"""Exit codes that all ranks end with: done, and agreed to leave (`failure.LEAVE_EXIT_CODE`)."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class KeeperTask:
    """The task of a keeper."""

    command: list[str]
    """The command that starts a worker."""
    workers: list[dict[str, str]]
    """For each worker, environment variables in addition to this process's."""
    address: str
    """Where the store is served."""
    port: int
    serves: bool
    """Whether this keeper serves it."""
    path: list[str] = field(default_factory=lambda: list(sys.path))
    """Where Python finds modules."""


def become_keeper(task: KeeperTask) -> NoReturn:
    """Replace this process by a keeper, which keeps nothing of it but the process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    code = f"import sys; sys.path[:] = {task.path!r}; from {__name__} import main; main()"
    environment = os.environ | {_TASK: json.dumps(asdict(task))}
    os.execve(sys.executable, [sys.executable, "-c", code], environment)


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


class Worker:
    """A worker process, and what its keeper knows of it.

    Args:
        start: Starts it: returns its process id, given the variables that its environment has
            besides this process's, and a descriptor that it inherits.
    """

    def __init__(self, start: Callable[[dict[str, str], int], int]) -> None:
        self._told, write = os.pipe()
        os.set_blocking(self._told, False)
        self.pid = start({KEPT: str(write)}, write)
        os.close(write)
        self._status: int | None = None
        self.member: tuple[str, int] | None = None
        """The prefix of its membership, and its number; None until it has told."""
        self.died_in_training: bool | None = None
        """Whether it died before training had ended; None until the membership has been told."""

    def look(self) -> None:
        """Check whether it has ended, and read what it has told; called by one thread only."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = status if pid else None
        with suppress(BlockingIOError):
            lines = os.read(self._told, 65536).splitlines()
            if lines:
                prefix, number = json.loads(lines[-1])
                self.member = prefix, number

    @property
    def code(self) -> int | None:
        """Its exit code, 128 + n where signal n has ended it; None while it runs."""
        if self._status is None:
            return None
        code = os.waitstatus_to_exitcode(self._status)
        return code if code >= 0 else 128 - code

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
    """

    def __init__(
        self, workers: Sequence["Worker"], *, address: str, port: int, serves: bool
    ) -> None:
        self._workers = workers
        self._address, self._port, self._serves = address, port, serves
        self._woken = threading.Event()
        self._seen: tuple[int, _Outlook | None] = (0, None)
        """The number of dead workers reported to the membership, and its answer."""

    def run(self) -> int:
        """Keep the workers until they have ended; return the exit code."""
        threading.Thread(target=self._watch_store, daemon=True).start()
        signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
        while True:
            # Not `sigtimedwait`, which tells of a signal that never was, in memory that nobody has
            # written to, if this process is stopped and goes on after the timeout.
            received = signal.sigwaitinfo(_BLOCKED)
            if received.si_signo in _HANDED_ON:
                if received.si_code != _FROM_TERMINAL:
                    self._hand_on(received.si_signo)
                continue
            for worker in self._workers:
                worker.look()
            self._woken.set()
            code = self._judge()
            if code is not None:
                return code

    def _hand_on(self, number: int) -> None:
        for worker in self._workers:
            worker.signal(number)

    def _judge(self) -> int | None:
        """Return this keeper's exit code; None while it has to stay."""
        dead = self._dead()
        for worker in dead:
            if worker.member is None:
                # It wasn't a member yet, and the run can't begin without it.
                return worker.code
        num_living = sum(worker.code is None for worker in self._workers)
        if num_living:
            return None
        if not dead:
            return max(worker.code or 0 for worker in self._workers)
        num_told, outlook = self._seen
        if num_told < len(dead) or outlook in (None, _Outlook.GOES_ON):
            return None
        return 0 if outlook is _Outlook.ENDED else dead[0].code

    def _dead(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.code not in (None, *_AT_ONCE)]

    # -- the thread that waits for the store ------------------------------------------------------

    def _watch_store(self) -> None:
        """Serve the store, or connect to it; report dead workers, and end those given up."""
        importing = threading.Thread(target=_import_slowly)
        importing.start()
        importing.join()
        from datetime import timedelta

        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        if self._serves:
            # Every member of the run is a client of it, several times over.
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
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
                if self._may_rest():
                    time.sleep(_LOOK_AT_RUN_S)
        except Exception:
            # The client's own errors have many types. The run ends with the store.
            self._seen = len(self._workers), _Outlook.OVER

    def _may_rest(self) -> bool:
        """Whether nothing is left to tell, not even of a worker that died during the last look."""
        return self._seen == (len(self._dead()), _Outlook.GOES_ON)

    def _look(self, store: "Store") -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        from lightning_hetero.runtime.generation import records

        dead = self._dead()
        # The dead first: others wait for that word.
        for worker in sorted(self._workers, key=lambda item: item not in dead):
            if worker.member is None:
                continue
            prefix, number = worker.member
            of_run = PrefixStore(prefix, store)
            if worker.code is None:
                if records.is_gone(of_run, number):
                    # The others have given it up, and it hasn't noticed.
                    worker.signal(signal.SIGKILL)
            elif worker in dead and worker.died_in_training is None:
                worker.died_in_training = not records.has_ended(of_run)
                records.tell_gone(of_run, number, worker.describe_end())
        # While a worker lives, this process stays whatever becomes of the run.
        lives = any(worker.code is None for worker in self._workers)
        self._seen = len(dead), None if lives else self._outlook(store, dead)

    def _outlook(self, store: "Store", dead: Sequence["Worker"]) -> "_Outlook | None":
        """Return what the membership says of the run of dead workers; None if they had none."""
        from torch.distributed.distributed_c10d import PrefixStore

        from lightning_hetero.runtime.generation import newcomers, records

        outlook = None
        for worker in dead:
            if worker.member is None:
                continue
            prefix, number = worker.member
            of_run = PrefixStore(prefix, store)
            outlook = _Outlook.OVER
            if newcomers.has_only_knocked(of_run, number):
                # The run is none of its own: whoever started it hears at once that it failed.
                continue
            if records.has_ended(of_run):
                # What fails after training, in code that follows, is a failure of the script.
                outlook = _Outlook.ENDED if worker.died_in_training else _Outlook.OVER
            elif records.is_anybody_left(of_run):
                outlook = _Outlook.GOES_ON
        return outlook


def _import_slowly() -> None:
    """Import torch after the workers, which import it, too, and have more to do."""
    os.nice(10)  # On Linux this thread's alone.
    import torch.distributed  # noqa: F401


_LIBC = ctypes.CDLL(None)


def block_signals() -> None:
    """Leave a keeper's signals to its loop; before any thread exists, so that none takes them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)


def be_kept() -> None:
    """Make this worker die with its keeper, and unblock the signals that the keeper blocks."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def main() -> None:
    """Run as a keeper, with the task from the environment."""
    block_signals()
    task = KeeperTask(**json.loads(os.environ.pop(_TASK)))

    def start(own: dict[str, str], environment: dict[str, str], descriptor: int) -> int:
        pid = os.fork()
        if pid == 0:
            be_kept()
            os.set_inheritable(descriptor, True)
            os.execve(task.command[0], task.command, os.environ | own | environment)
        return pid

    workers = [Worker(partial(start, own)) for own in task.workers]
    keeper = Keeper(workers, address=task.address, port=task.port, serves=task.serves)
    os._exit(keeper.run())
