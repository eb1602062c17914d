"""Find the config of a Hugging Face model on this machine, without its libraries or a network.

The cache keeps a model `org/name` in `models--org--name`: `refs/main` names a commit, and
`snapshots/<commit>` has its files.
"""

import os
import re
from pathlib import Path

__all__ = ["cached_config", "hub_cache"]

_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?", flags=re.ASCII)


def hub_cache() -> Path:
    """Return the folder where Hugging Face's libraries keep what they have downloaded."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "huggingface" / "hub"


def cached_config(name: str) -> Path | None:
    """Return the `config.json` of a model of that name, None if it isn't in the cache.

    Of several snapshots the one that `main` names counts, else the newest.
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
