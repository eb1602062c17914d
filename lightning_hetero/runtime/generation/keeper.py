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

import ctypes
import enum
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from lightning_hetero.runtime.generation.worker import ALL_LEAVE, Worker

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ["Keeper", "KeeperTask", "be_kept", "become_keeper", "block_signals", "keep", "main"]

_TASK = "LIGHTNING_HETERO_KEEPER"
_LOOK_S = 0.2
"""How often it looks into the store; a tenth as often without a worker, while the run goes on."""
_ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_HANDED_ON = _ENDING | {signal.SIGUSR1, signal.SIGUSR2}
_BLOCKED = _HANDED_ON | {signal.SIGCHLD, signal.SIGALRM}
_FROM_TERMINAL = 0x80
"""`si_code` of what the system itself sends: to the whole process group, so to workers as well."""
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
    replaces: bool
    """Whether joiners take the devices of lost workers."""
    path: list[str] = field(default_factory=lambda: list(sys.path))
    """Where Python finds modules."""


def become_keeper(task: KeeperTask) -> NoReturn:
    """Replace this process by a keeper, which keeps nothing of it but the process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    code = f"import sys; sys.path[:] = {task.path!r}; from {__name__} import main; main()"
    environment = os.environ | {_TASK: json.dumps(asdict(task))}
    os.execve(sys.executable, [sys.executable, "-c", code], environment)


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
            received = signal.sigwaitinfo(_BLOCKED)
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
        return 0 if outlook is _Outlook.ENDED else dead[0].code

    def _dead(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.is_lost]

    def _has_members(self) -> bool:
        """Whether a worker lives for which this process stays, whatever becomes of the run."""
        return any(worker.code is None and not worker.is_joiner for worker in self._workers)

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
                    time.sleep(10 * _LOOK_S)
        except Exception:
            # The client's own errors have many types. The run ends with the store.
            self._seen = len(self._workers), _Outlook.OVER

    def _may_rest(self) -> bool:
        """Whether nothing is left to tell, not even of a worker that died during the last look."""
        lives = any(worker.code is None for worker in self._workers)
        return not lives and self._seen == (len(self._dead()), _Outlook.GOES_ON)

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
                worker.note_entry()
            if worker.code is None:
                if records.is_gone(of_run, number):
                    # The others have given it up, and it hasn't noticed.
                    worker.signal(signal.SIGKILL)
            elif worker in dead and worker.died_in_training is None:
                worker.note_death(in_training=not records.has_ended(of_run))
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
            elif records.has_ended(of_run):
                # What fails after training, in code that follows, is a failure of the script.
                outlook = _Outlook.ENDED if worker.died_in_training else _Outlook.OVER
            elif records.is_anybody_left(of_run):
                outlook = _Outlook.GOES_ON
            outlooks.add(outlook)
        # Where one worker's end is a failure, so is this process's.
        return max(outlooks, key=lambda outlook: outlook.value, default=None)


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
    os._exit(keep(KeeperTask(**json.loads(os.environ.pop(_TASK)))))


def keep(task: KeeperTask) -> int:
    """Start the workers of a task, and keep them; return the exit code of this process.

    Called by the main thread, before there are others, once signals are blocked.
    """

    def start(own: dict[str, str], environment: dict[str, str], descriptor: int) -> int:
        pid = os.fork()
        if pid == 0:
            be_kept()
            os.set_inheritable(descriptor, True)
            os.execve(task.command[0], task.command, os.environ | own | environment)
        return pid

    workers = [Worker(partial(start, own)) for own in task.workers]
    keeper = Keeper(
        workers,
        address=task.address,
        port=task.port,
        serves=task.serves,
        replaces=task.replaces,
    )
    return keeper.run()
