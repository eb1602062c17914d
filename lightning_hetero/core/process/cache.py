"""Where measurements that are worth keeping between runs are kept."""

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """Return `$LIGHTNING_HETERO_CACHE`, else `lightning-hetero` in the user's cache folder."""
    own = os.environ.get("LIGHTNING_HETERO_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lightning-hetero"
