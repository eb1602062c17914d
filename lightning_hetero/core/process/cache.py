"""Where measurements that are worth keeping between runs are kept."""

import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["cache_folder", "write_whole"]


def cache_folder() -> Path:
    """Return `$LIGHTNING_HETERO_CACHE`, else `lightning-hetero` in the user's cache folder."""
    own = os.environ.get("LIGHTNING_HETERO_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lightning-hetero"


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file, which other processes see whole or not at all.

    Raises:
        OSError: The folder, which is made if it is missing, can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.stem}.{os.getpid()}{path.suffix}")
    write(temporary)
    temporary.replace(path)
