"""End the connections of a run's groups, so that nobody waits in them any more.

gloo's `abort` and `shutdown` end no wait (torch 2.13), so a rank that waits for a frozen one, or
for one that has given up waiting itself, would wait until its timeout. Groups outlive their run
besides: frames of the exception that ended it hold them. So what groups open is noted, and hung up
by hand.

gloo tells a waiting rank of a connection that ended while it was read, but not always of one on
which a write failed: the send is forgotten, and who waits for it waits until the timeout (seen in a
third of hang-ups while ranks exchanged message after message). So a connection first ends for
reading only, on this rank alone: the last messages can still be written, and the other rank sees
nothing yet, since it stays open. A moment later nobody here talks any more, and it ends for both.
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

__all__ = ["Connections", "is_broken_connection"]

_T = TypeVar("_T")
_NOTICE_S = 0.05
"""How long groups may take to notice that nothing more is to be read; a group that is nearly there
may take ten times as long once connections are hung up."""

_OWN_MEMORY = ("out of memory", "Failed to CUDA calloc", "Failed to CUDA host alloc")
"""Texts of NCCL's errors about memory on this rank's own device: no peer has failed."""

_Opened = set[tuple[int, str]]
"""File descriptors, and what the system says they are: a descriptor is soon used again."""


class Connections:
    """Connections of this process's groups, on Linux; elsewhere nothing is known of them.

    Args:
        may_end: Whether the process may outlive them, so that nothing may wait in them for long.
    """

    def __init__(self, *, may_end: bool = False) -> None:
        self._opened: _Opened = set()
        # What is there already outlives this, such as a membership's own connection to its store,
        # whatever another thread does while connections are opened.
        self._kept: _Opened = _sockets() if may_end else set()
        self._may_end = may_end
        self._is_hung_up = False

    def open(self, make: Callable[[], _T]) -> _T:
        """Return what `make` does, such as a new group, and note what is opened meanwhile.

        gloo waits for every rank of a new group, and nothing ends that wait but its timeout, not
        even that the rank is dead. So where connections may be hung up, a thread waits, and is left
        there.

        Raises:
            RuntimeError: They were hung up. It counts as a broken connection.
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
            if self._is_hung_up and not wait([answer], 10 * _NOTICE_S).done:
                self.check()
        return answer.result()

    def check(self) -> None:
        """Go on only where they weren't hung up.

        Raises:
            RuntimeError: They were. It counts as a broken connection.
        """
        if self._is_hung_up:
            raise RuntimeError("gloo: connections were hung up before all ranks had come.")

    def hang_up(self) -> None:
        """End the connections, and what waits for them."""
        self._is_hung_up = True
        with ExitStack() as held:
            ends = [held.enter_context(end) for end in self._ends()]
            for end in ends:
                _shut(end, socket.SHUT_RD)
            if ends:
                time.sleep(_NOTICE_S)
            for end in ends:
                _shut(end, socket.SHUT_RDWR)

    def _ends(self) -> Iterator[socket.socket]:
        """Yield further descriptors of the connections, so that they stay open until closed."""
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
