"""What this user's runs have left in this machine's shared memory.

A run keeps its newest checkpoint there for its own restart and frees it at its end; one that failed
for good frees nothing.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["SHARED_MEMORY", "MemoryPlace", "memory_places", "own_folder"]

SHARED_MEMORY = Path("/dev/shm")
"""Where Linux keeps shared memory."""


class MemoryPlace(NamedTuple):
    """The folder of one run, or of several that save to the same places."""

    folder: Path
    num_bytes: int
    last_write_s: float
    """When anything was last written, seconds since the epoch."""


def own_folder() -> Path:
    """Return this user's folder in shared memory."""
    return SHARED_MEMORY / f"lightning_hetero-{os.getuid()}"


def memory_places() -> Iterator[MemoryPlace]:
    """Yield this user's places in shared memory; links are not followed."""
    root = own_folder()
    if not root.is_dir() or root.is_symlink():
        return
    for folder in sorted(root.iterdir()):
        if folder.is_symlink() or not folder.is_dir():
            continue
        num_bytes, last_s = 0, folder.stat().st_mtime
        for path in folder.rglob("*"):
            try:
                status = path.lstat()
            except FileNotFoundError:
                # A run that still writes has deleted it meanwhile.
                continue
            num_bytes += status.st_size
            last_s = max(last_s, status.st_mtime)
        yield MemoryPlace(folder, num_bytes, last_s)
