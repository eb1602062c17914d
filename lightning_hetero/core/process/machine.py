"""Which machine this is."""

import contextlib
import os
import socket
import uuid
from pathlib import Path

__all__ = ["machine_id", "machine_namespace"]


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
