"""Identify a process: its machine, the run that it is a member of, and its packages' versions."""

import contextlib
import os
import socket
import uuid
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = [
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
    """Return a package's version, or `otherwise` if it isn't installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return otherwise
