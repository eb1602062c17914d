"""Let the process that serves a run's store open as many files as the store has clients.

A store that runs out of files doesn't answer later clients, and the run waits until its timeout. So
before ranks connect, the server's limit is raised as far as the system allows; if that doesn't
suffice, the run ends at once with an error. A store has 2n clients at n ranks, one per rank for
calls that may wait and one for its heartbeat; 6n if ranks may be outlived, with those of
membership, generation and keepers. A rank itself has few connections at any n.

The server is rank 0, its keeper, or torchrun's agent: the parent of the processes that it starts.
"""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from lightning_hetero.core.errors import ConfigurationError

__all__ = ["allow_clients_of_agent", "allow_files", "more_files"]

_CLIENTS_PER_RANK = 2
_CLIENTS_PER_MEMBER = 6
_OTHER_FILES = 256
"""Other files that may be open at the same time: of the run, its groups and its data."""


def allow_files(world_size: int, *, are_members: bool = False, process_id: int = 0) -> None:
    """Allow a process, by default this one, enough open files to serve a run's store.

    Args:
        world_size: Number of ranks.
        are_members: Whether ranks may be outlived.
        process_id: Id of the process; 0 for this one.

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


def allow_clients_of_agent(world_size: int) -> None:
    """Allow torchrun's agent, if it serves the store, enough files; called by what it has started.

    Raises:
        ConfigurationError: See `allow_files`.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    with suppress(PermissionError):  # Of another user: then its limit is that one's, too.
        allow_files(world_size, are_members=True, process_id=os.getppid())


@contextmanager
def more_files(count: int) -> Iterator[None]:
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
