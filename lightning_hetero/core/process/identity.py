"""A process's machine, the run that it is a member of, its packages' versions, its open files."""

import contextlib
import os
import re
import resource
import socket
import uuid
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

__all__ = [
    "allow_files",
    "installed_version",
    "machine_id",
    "machine_namespace",
    "membership_name",
    "name_membership",
]

_MEMBERSHIP = "LIGHTNING_HETERO_MEMBERSHIP"


def machine_id() -> str:
    """Return an id of this machine, on Linux another one after every boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()}-{uuid.getnode():x}"


def machine_namespace() -> str:
    """Return an id of the machine, or container on it, in which process ids are unique."""
    with contextlib.suppress(OSError):
        return f"{machine_id()}/{os.readlink('/proc/self/ns/pid')}"
    return machine_id()


def name_membership(name: str) -> None:
    """Set the name of the run that this process, and those that it starts, are members of."""
    os.environ[_MEMBERSHIP] = name


def membership_name() -> str | None:
    """Return the name that `name_membership` set; None if ranks don't survive others' loss."""
    return os.environ.get(_MEMBERSHIP)


@cache
def installed_version(package: str, *, otherwise: str = "unknown") -> str:
    """Return a package's version, or `otherwise` if it isn't installed.

    Cached. Only the metadata's version line is parsed: `importlib.metadata.version` parses all of
    it, which takes up to 10 ms for a package.
    """
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return otherwise
    head = (found.read_text("METADATA") or "").partition("\n\n")[0]
    said = re.search(r"^Version: *(\S+)", head, re.MULTILINE)
    return said[1] if said else found.version


def allow_files(process_id: int) -> None:
    """Let a process of this user open as many files as the system's hard limit allows."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # No Linux; or of another user.
        _, hard = resource.prlimit(process_id, resource.RLIMIT_NOFILE)
        resource.prlimit(process_id, resource.RLIMIT_NOFILE, (hard, hard))
