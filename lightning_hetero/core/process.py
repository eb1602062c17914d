"""This process and others: its identity, its cached files, its deadlines, and helper processes.

A wait ends once there has been no progress for the seconds that the waiting code allows; these come
from the user's `timeout`. If progress can't be seen, they count from the beginning.

Helper processes answer questions, so that solving doesn't slow down the trainer: a solving thread
would hold Python's global lock, which the thread that launches kernels needs. A process doesn't,
and if it dies, training goes on. It imports neither torch nor Lightning, so it starts quickly and
takes little memory.
"""

import contextlib
import os
import pickle
import resource
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_MEMBERSHIP = "LIGHTNING_HETERO_MEMBERSHIP"
_PROGRAM = "import sys; sys.path.insert(0, {root!r}); from {module} import serve; serve()"


def machine_id() -> str:
    """Return an id of this machine, which on Linux changes with every boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()}-{uuid.getnode():x}"


def machine_namespace() -> str:
    """Return an id of the machine, or container on it, within which process ids are unique."""
    with contextlib.suppress(OSError):
        return f"{machine_id()}/{os.readlink('/proc/self/ns/pid')}"
    return machine_id()


def is_loopback(host: str) -> bool:
    """Whether the name or address of a host means the machine that uses it."""
    return host in ("localhost", "::1") or host.startswith("127.")


def name_membership(name: str) -> None:
    """Set the name of the run that this process, and those that it starts, are members of."""
    os.environ[_MEMBERSHIP] = name


def membership_name() -> str | None:
    """Return the name that `name_membership` set; None if ranks don't outlive others."""
    return os.environ.get(_MEMBERSHIP)


def allow_files(process_id: int) -> None:
    """Let a process of this user open as many files as the system's hard limit allows."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # Not on Linux, or another user.
        _, hard = resource.prlimit(process_id, resource.RLIMIT_NOFILE)
        resource.prlimit(process_id, resource.RLIMIT_NOFILE, (hard, hard))


@cache
def installed_version(package: str, *, otherwise: str = "unknown") -> str:
    """Return a package's version, or `otherwise` if it isn't installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return otherwise


def cache_folder() -> Path:
    """Return `$LIGHTNING_HETERO_CACHE`, else `lightning-hetero` in the user's cache folder."""
    own = os.environ.get("LIGHTNING_HETERO_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lightning-hetero"


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: readers, and other writers, see it whole or not at all.

    Args:
        path: The file; its folder is made if it is missing.
        write: Writes the contents to the path that it gets.

    Raises:
        OSError: The folder can't be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.stem}.{uuid.uuid4().hex}{path.suffix}")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class Progress:
    """Counts a thread's progress, for code that waits for it."""

    def __init__(self) -> None:
        self.count = 0
        self.is_given_up = False
        """Whether nobody waits for the work any more."""
        self.part_of: Progress | None = None
        """The progress of a larger task that this work is part of; it ticks, too."""

    def tick(self) -> None:
        """Note some progress."""
        self.count += 1
        if self.part_of is not None:
            self.part_of.tick()

    def give_up(self) -> None:
        """Note that nobody waits for the work any more."""
        self.is_given_up = True

    def refuse_if_late(self) -> None:
        """Raise TimeoutError if nobody waits any more, since late work could undo newer work."""
        if self.is_given_up:
            raise TimeoutError("This came too late.")


class Deadline:
    """Is over once there has been no progress for `timeout_s` seconds.

    Args:
        timeout_s: The seconds.
        progress: The progress; if it can't be seen, call `renew` for it.
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
        """Whether there was no progress for too long, as far as earlier calls could see."""
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
                raise TimeoutError(f"There was no progress for {self._timeout_s:g} s.")


class AnsweringProcess:
    """A process that runs `serve()` of a module, which calls `answer_questions`.

    Args:
        module: The module's full name.
        is_silent: Whether its output is discarded; else it goes to standard error.
    """

    def __init__(self, module: str, *, is_silent: bool = False) -> None:
        self._module = module
        self._is_silent = is_silent
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Id of the process that runs."""
        return self._process.pid

    def ask(self, question: Any) -> Any:
        """Wait for the answer; OSError, EOFError or UnpicklingError if the process has died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(question, self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    def restart(self) -> None:
        """End the process and start a new one."""
        self.stop()
        self._process = self._start()

    def kill(self) -> None:
        """Kill the process, from any thread, even if another thread waits for an answer."""
        self._process.kill()

    def stop(self) -> None:
        """Kill the process, wait for its end and close its pipes."""
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # The process died before it read the last question.

    def _start(self) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).parents[2])
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(root=root, module=self._module)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if self._is_silent else None,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            # Ctrl-C must reach only the trainer, which may still want to save.
            start_new_session=True,
        )


def answer_questions(answer: Callable[[Any], Any]) -> None:
    """Answer until standard input ends, which happens when the asking process ends."""
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Printed text goes to standard error, so it can't mix with the answers.
    while True:
        try:
            question = pickle.load(questions)
        except EOFError:
            return
        pickle.dump(answer(question), answers)
        answers.flush()
