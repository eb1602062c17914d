"""End the connections of a run's groups, so that nobody waits in them any more.

gloo's `abort` leaves its connections open, so a rank that waits for a frozen one, or for one that
has given up waiting itself, would wait until its timeout. Groups outlive their run besides: frames
of the exception that ended it hold them. So what groups open is noted, and hung up by hand.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["Connections"]

_Opened = set[tuple[int, str]]
"""File descriptors, and what the system says they are: a descriptor is soon used again."""


class Connections:
    """What this process's groups have opened, on Linux; elsewhere nothing is known of it.

    Groups connect when they are made, up to `meeting.MAX_EAGER_RANKS` ranks. Those that connect
    later end with the frozen process, or with their timeout.
    """

    def __init__(self) -> None:
        self._opened: _Opened = set()

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Note what is opened in this context, by whichever thread."""
        before = _sockets()
        yield
        self._opened |= _sockets() - before

    def hang_up(self, *, spared_port: int | None = None) -> None:
        """End the connections, and what waits for them, but those to a port (the store's)."""
        for descriptor, _ in self._opened & _sockets():
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
                is_listening = end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if not is_listening and end.getpeername()[1] != spared_port:
                    end.shutdown(socket.SHUT_RDWR)


def _sockets() -> _Opened:
    found: _Opened = set()
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return {item for item in found if item[1].startswith("socket:")}
