"""The remains of this user's runs in this machine's shared memory.

A run keeps its newest checkpoint there for its own restart and frees it at its end; one that failed
for good frees nothing.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lightning_hetero.core.errors import ConfigurationError

__all__ = [
    "SHARED_MEMORY",
    "MemoryPlace",
    "has_shared_memory",
    "make_own_folder",
    "memory_places",
    "own_folder",
]

SHARED_MEMORY = Path("/dev/shm")
"""Where Linux keeps shared memory."""


class MemoryPlace(NamedTuple):
    """The folder of one run, or of several that save to the same places."""

    folder: Path
    num_bytes: int
    last_write_s: float
    """When anything was last written, seconds since the epoch."""


def has_shared_memory() -> bool:
    """Whether this machine has any; some containers have none, or one that nobody may write."""
    return os.access(SHARED_MEMORY, os.W_OK | os.X_OK)


def own_folder() -> Path:
    """Return this user's folder in shared memory, which may not be there yet."""
    return SHARED_MEMORY / f"lightning_hetero-{os.getuid()}"


def make_own_folder() -> Path:
    """Return this user's folder in shared memory, which nobody else can read or replace.

    Raises:
        ConfigurationError: Somebody else has made it.
    """
    folder = own_folder()
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigurationError(
            f"{folder} is no folder of this user's (its owner has the id {status.st_uid}), so what "
            "is in it can't be trusted. Have it deleted, or give LayerwiseCheckpoint "
            "shared_memory=False."
        )
    folder.chmod(0o700)
    return folder


def memory_places() -> Iterator[MemoryPlace]:
    """Yield this user's places in shared memory; links are not followed."""
    root = own_folder()
    if not root.is_dir() or root.is_symlink():
        return
    for folder in sorted(root.iterdir()):
        if folder.is_symlink() or not folder.is_dir():
            continue
        num_bytes, last_s = 0, 0.0
        for path in _paths_below(folder):
            # A run that still writes may have deleted it meanwhile.
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                num_bytes += status.st_size
                last_s = max(last_s, status.st_mtime)
        yield MemoryPlace(folder, num_bytes, last_s)


def _paths_below(folder: Path) -> Iterator[Path]:
    """Yield a folder and all that is in it; what vanishes meanwhile is left out."""
    yield folder
    for name, folders, files in os.walk(folder):  # Unlike `rglob` it goes on where one has gone.
        yield from (Path(name, item) for item in (*folders, *files))
