"""Let the process that serves a run's store open as many files as it has clients.

A store that runs out of files answers nobody that comes later, and the run waits until its
timeout. So before ranks connect the server's limit is raised as far as the system lets it be, and
where that isn't far enough the run ends at once and says so. Clients of a store, at n ranks: 2n,
one of each rank for calls that may wait and one for its heartbeat; 6n where ranks may be outlived,
with those of membership, generation and keepers. A rank itself has few connections at any n.

The server is rank 0, its keeper, or torchrun's agent: an ancestor of the ranks beside it.
"""

import os
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightning_hetero.core.errors import ConfigurationError

__all__ = ["allow_clients_of_ancestor", "allow_files", "find_server"]

_CLIENTS_PER_RANK = 2
_CLIENTS_PER_MEMBER = 6
_OTHER_FILES = 256
"""Open at a time besides: of the run, its groups and its data."""
_LISTENS = "0A"
"""State of a socket in the system's tables."""


def allow_files(world_size: int, *, are_members: bool = False, process_id: int = 0) -> None:
    """Let a process, this one unless told, serve the store of a run.

    Args:
        world_size: Number of ranks.
        are_members: Whether ranks may be outlived.
        process_id: The process's.

    Raises:
        ConfigurationError: The system's hard limit doesn't allow it.
    """
    get: Callable[..., Any] = resource.getrlimit
    put: Callable[..., Any] = resource.setrlimit
    if process_id:  # Linux only, where alone others are found.
        get = put = partial(resource.prlimit, process_id)
    soft, hard = get(resource.RLIMIT_NOFILE)
    clients = _CLIENTS_PER_MEMBER if are_members else _CLIENTS_PER_RANK
    needed = clients * world_size + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigurationError(
            f"Process {process_id or os.getpid()} serves the run's store, which needs {needed} "
            f"open files for {world_size} ranks, but the system allows {hard}. Raise the limit "
            f"(ulimit -Hn {needed}) where it is started."
        )
    put(resource.RLIMIT_NOFILE, (needed, hard))


def allow_clients_of_ancestor(port: int, world_size: int) -> None:
    """Let the process that started this one serve the store, if it does: an agent, or a keeper.

    Raises:
        ConfigurationError: See `allow_files`.
    """
    server = find_server(port, _ancestors())
    if server is not None:
        with suppress(PermissionError):  # Of another user: then its limit is that one's, too.
            allow_files(world_size, are_members=True, process_id=server)


def find_server(port: int, process_ids: Iterable[int]) -> int | None:
    """Return which of some processes listens on a port of this machine; None if none does."""
    sockets = set(_listening(port))
    for process_id in process_ids:
        with suppress(OSError):
            files = Path(f"/proc/{process_id}/fd")
            if any(os.readlink(item) in sockets for item in files.iterdir()):
                return process_id
    return None


def _listening(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            lines = Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]
            for _, local, _, state, *_, inode in (line.split()[:10] for line in lines):
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                    yield f"socket:[{inode}]"


def _ancestors() -> Iterator[int]:
    """Yield the process that has started this one, the one that has started that, and so on."""
    process_id = os.getppid()
    while process_id > 1:
        yield process_id
        # What comes before the parent's id may hold any character, but ends with a bracket.
        known = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8", errors="replace")
        process_id = int(known.rpartition(")")[2].split()[1])
