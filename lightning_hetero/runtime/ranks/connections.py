"""Close the connections of a run's process groups, so that nothing waits in them any more.

gloo's `abort` and `shutdown` end no waits (torch 2.13). So a rank that waits for a frozen one, or
for one that has itself stopped waiting, would wait until its timeout. Groups may also outlive their
run, because frames of the exception that ended it refer to them. Therefore the sockets that groups
open are recorded and closed here.

They are closed in two steps. gloo notifies a waiting rank if a connection ends while gloo reads,
but not always if a write fails: then the send is forgotten, and whoever waits for it waits until
the timeout (seen in a third of the cases while ranks exchanged message after message). So this rank
first closes a connection for reading only: its last messages can still be written, and the other
rank notices nothing. A moment later, when no thread here writes any more, it is closed in both
directions.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from typing import TypeVar

from torch import OutOfMemoryError
from torch.distributed import DistError

from lightning_hetero.core.errors import HeteroError
from lightning_hetero.core.process import allow_files

_T = TypeVar("_T")
_NOTICE_S = 0.05
"""Seconds in which groups notice that connections are closed for reading. A group that is just
being made may take ten times as long."""

_OWN_MEMORY = ("out of memory", "Failed to CUDA calloc", "Failed to CUDA host alloc")
"""Parts of NCCL's error messages about this rank's own memory: no peer has failed."""

_Opened = set[tuple[int, str]]
"""File descriptors, each with the system's description of it, because descriptors are reused."""


class Connections:
    """The connections of this process's groups; only on Linux, elsewhere none are known.

    Args:
        may_end: Whether the process may go on after the connections are closed.
    """

    def __init__(self, *, may_end: bool = False) -> None:
        self._opened: _Opened = set()
        # Connections that exist already aren't a group's: one may be a membership's, to its store.
        self._kept: _Opened = _sockets() if may_end else set()
        self._may_end = may_end
        self._is_closed = False

    def open(self, make: Callable[[], _T]) -> _T:
        """Return what `make` returns, such as a new group, and record the sockets that it opens.

        gloo waits for every rank of a new group, even for a dead one, and only a timeout ends that
        wait. So if connections may be closed here, `make` runs on a thread, which can be abandoned.

        Raises:
            RuntimeError: The connections were closed. It counts as a broken connection.
        """
        before = _sockets()
        try:
            return self._make(make) if self._may_end else make()
        finally:
            self._opened |= _sockets() - before - self._kept

    def _make(self, make: Callable[[], _T]) -> _T:
        answer: Future[_T] = Future()

        def work() -> None:
            try:
                answer.set_result(make())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=work, name="new connections", daemon=True).start()
        while not wait([answer], _NOTICE_S).done:
            if self._is_closed and not wait([answer], 10 * _NOTICE_S).done:
                self.check()
        return answer.result()

    def check(self) -> None:
        """Check that the connections weren't closed.

        Raises:
            RuntimeError: They were closed. It counts as a broken connection.
        """
        if self._is_closed:
            raise RuntimeError(
                "gloo: connections were closed before all ranks had joined the group."
            )

    def close(self) -> None:
        """Close the connections, which ends all waits in them."""
        self._is_closed = True
        with ExitStack() as held:
            ends = [held.enter_context(end) for end in self._ends()]
            for end in ends:
                _shut(end, socket.SHUT_RD)
            if ends:
                time.sleep(_NOTICE_S)
            for end in ends:
                _shut(end, socket.SHUT_RDWR)

    def _ends(self) -> Iterator[socket.socket]:
        """Yield duplicates of the connections' descriptors, so that they stay open until closed."""
        allow_files(os.getpid())
        for descriptor, _ in self._opened & _sockets():
            with suppress(OSError):
                end = socket.socket(fileno=os.dup(descriptor))
                if end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    end.close()
                else:
                    yield end


def _shut(end: socket.socket, how: int) -> None:
    with suppress(OSError):  # The other rank has ended it.
        end.shutdown(how)


def is_broken_connection(error: Exception) -> bool:
    """Whether an error comes from a communicator, not from this rank's own code or memory."""
    text = str(error)
    if isinstance(error, OutOfMemoryError) or any(word in text for word in _OWN_MEMORY):
        return False
    if isinstance(error, DistError):
        return True
    if isinstance(error, HeteroError) or not isinstance(error, RuntimeError):
        return False
    return "gloo" in text or "NCCL" in text or "Connection closed by peer" in text


def _sockets() -> _Opened:
    found: _Opened = set()
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return {item for item in found if item[1].startswith("socket:")}
