"""Find cached files: measurements that are kept between runs, and Hugging Face's models.

Hugging Face's cache keeps a model `org/name` in `models--org--name`: `refs/main` names a commit,
and `snapshots/<commit>` has its files. They are found without its libraries or a network.
"""

import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path

__all__ = ["cache_folder", "cached_config", "hub_cache", "write_whole"]


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


_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?", flags=re.ASCII)


def hub_cache() -> Path:
    """Return the folder of Hugging Face's downloaded models."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "huggingface" / "hub"


def cached_config(name: str) -> Path | None:
    """Return the `config.json` of a model of that name; None if it isn't in the cache.

    Of several snapshots it is that of the one that `main` names, else of the newest.
    """
    if not _NAME.fullmatch(name):
        return None
    folder = hub_cache() / f"models--{name.replace('/', '--')}"
    snapshots = [path for path in folder.glob("snapshots/*/config.json") if path.is_file()]
    try:
        main = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        main = ""
    snapshots.sort(key=lambda path: (path.parent.name == main, path.stat().st_mtime))
    return snapshots[-1] if snapshots else None
