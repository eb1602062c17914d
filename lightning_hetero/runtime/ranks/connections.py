"""End the connections of a run's groups, so that nobody waits in them any more.

gloo's `abort` leaves its connections open, so a rank that waits for a frozen one, or for one that
has given up waiting itself, would wait until its timeout. Groups outlive their run besides: frames
of the exception that ended it hold them. So what groups open is noted, and hung up by hand.

gloo tells a waiting rank of a connection that ended while it was read, but not always of one on
which a write failed: the send is forgotten, and who waits for it waits until the timeout (seen in a
third of hang-ups while ranks exchanged message after message). So a connection first ends for
reading only, on this rank alone: the last messages can still be written, and the other rank sees
nothing yet, since it stays open. A moment later nobody here talks any more, and it ends for both.
"""

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

from torch import OutOfMemoryError
from torch.distributed import DistError

from lightning_hetero.core.errors import HeteroError

__all__ = ["LAZY", "Connections", "is_broken_connection"]

_T = TypeVar("_T")
LAZY = "TORCH_GLOO_LAZY_INIT"
"""Read by torch: lets gloo connect pairs of ranks when they first talk."""
_NOTICE_S = 0.05
"""How long groups may take to notice that nothing more is to be read; a group that is nearly there
may take ten times as long once connections are hung up."""

_OWN_MEMORY = ("out of memory", "Failed to CUDA calloc", "Failed to CUDA host alloc")
"""Texts of NCCL's errors about memory on this rank's own device: no peer has failed."""

_Opened = set[tuple[int, str]]
"""File descriptors, and what the system says they are: a descriptor is soon used again."""
_Address = tuple[str, int]


class Connections:
    """Connections of this process's groups, on Linux; elsewhere nothing is known of them.

    Up to `meeting.MAX_EAGER_RANKS` ranks groups connect when they are made. Above that, two ranks
    connect when they first talk, which nobody sees. Such a connection is known by its ends: one of
    them is where a group listens, here or on another rank.

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
        self._others: set[_Address] = set()
        """Where the groups of all ranks listen."""

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
            self._opened |= _sockets() - before

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

    def share(self, gather: Callable[[list[_Address]], Iterable[Sequence[_Address]]]) -> None:
        """Hear where the others' groups listen; called by every rank once groups are made.

        Communicates nothing where all connections were opened with the groups.

        Args:
            gather: Returns what each rank gave.
        """
        if not _connects_lazily():
            return
        listening: list[_Address] = []
        for descriptor, _ in self._opened & _sockets():
            with suppress(OSError), _end_of(descriptor) as end:
                if _listens(end):
                    listening.append(_address(end.getsockname()))
        for addresses in gather(listening):
            self._others.update(map(_address, addresses))

    def hang_up(self, *, spared_port: int | None = None) -> None:
        """End the connections, and what waits for them, but those to a port (the store's)."""
        self._is_hung_up = True
        sockets = _sockets() - self._kept
        with _more_files(len(sockets)), ExitStack() as held:
            ends = [held.enter_context(end) for end in self._ends(sockets, spared_port)]
            for end in ends:
                _shut(end, socket.SHUT_RD)
            if ends:
                time.sleep(_NOTICE_S)
            for end in ends:
                _shut(end, socket.SHUT_RDWR)

    def _ends(self, sockets: _Opened, spared_port: int | None) -> Iterator[socket.socket]:
        """Yield those of the groups' connections, by descriptors that the caller closes."""
        for item in sockets:
            with suppress(OSError), _end_of(item[0]) as end:
                if not _listens(end) and self._is_of_group(item, end, spared_port):
                    yield end.dup()

    def _is_of_group(
        self, item: tuple[int, str], end: socket.socket, spared_port: int | None
    ) -> bool:
        peer = end.getpeername()
        if item in self._opened:
            return bool(peer[1] != spared_port)
        if end.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        return not self._others.isdisjoint({_address(end.getsockname()), _address(peer)})


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


def _connects_lazily() -> bool:
    """Whether pairs of ranks connect when they first talk; the same on all ranks of a run."""
    return os.environ.get(LAZY, "").lower() in ("1", "t", "true", "y", "yes")


def _end_of(descriptor: int) -> socket.socket:
    return socket.socket(fileno=os.dup(descriptor))


def _shut(end: socket.socket, how: int) -> None:
    with suppress(OSError):  # The other rank has ended it.
        end.shutdown(how)


def _listens(end: socket.socket) -> bool:
    return bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _address(name: Sequence[Any]) -> _Address:
    return str(name[0]), int(name[1])


def _sockets() -> _Opened:
    found: _Opened = set()
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return {item for item in found if item[1].startswith("socket:")}


@contextmanager
def _more_files(count: int) -> Iterator[None]:
    """In this context let this process have `count` more files open, as far as the system does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        is_free = hard == resource.RLIM_INFINITY
        more = soft + count if is_free else min(soft + count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
