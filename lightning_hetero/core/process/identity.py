"""Who a process is: on which machine, a member of which run, with which versions of packages."""

import contextlib
import os
import re
import socket
import uuid
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
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
    """Return what tells this machine, as it was started last, from all others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()}-{uuid.getnode():x}"


def machine_namespace() -> str:
    """Return where process ids mean the same processes: a machine, or a container on it."""
    with contextlib.suppress(OSError):
        return f"{machine_id()}/{os.readlink('/proc/self/ns/pid')}"
    return machine_id()


def name_membership(name: str) -> None:
    """Name the run that this process, and those that it starts, are members of."""
    os.environ[_MEMBERSHIP] = name


def membership_name() -> str | None:
    """Return what `name_membership` said; None where nobody outlives the loss of a rank."""
    return os.environ.get(_MEMBERSHIP)


@cache
def installed_version(package: str, *, otherwise: str = "unknown") -> str:
    """Return a package's version, or `otherwise` where it isn't installed.

    Looked up once a process. Only the line that says it is looked at: `importlib.metadata.version`
    takes up to 10 ms for a package, since it parses all that its authors have written, too.
    """
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return otherwise
    head = (found.read_text("METADATA") or "").partition("\n\n")[0]
    said = re.search(r"^Version: *(\S+)", head, re.MULTILINE)
    return said[1] if said else found.version
