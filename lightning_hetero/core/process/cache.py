"""Find the folder of measurements that are kept between runs, and write files there whole."""

import os
import uuid
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
    """Write a file atomically: others, also other writers, see it whole or not at all.

    Args:
        path: The file; its folder is made if it is missing.
        write: Writes the contents to the path that it gets.

    Raises:
        OSError: The folder can't be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.stem}.{uuid.uuid4().hex}{path.suffix}")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
