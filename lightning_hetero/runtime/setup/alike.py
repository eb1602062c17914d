"""See at the start that all ranks run the same thing: one that doesn't is named, and nobody hangs.

A stale plan file or another version on one node would make messages differ in size.
"""

import platform
import zlib
from collections import Counter
from importlib.metadata import PackageNotFoundError, version

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.runtime.ranks.communicators import Communicators

__all__ = ["check_alike"]

_PACKAGES = ("lightning_hetero", "torch", "lightning", "torchmetrics", "numpy")


def _versions() -> dict[str, str]:
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def check_alike(comms: Communicators, **facts: object) -> None:
    """Compare facts of all ranks, by their text, and versions of packages; collective.

    Raises:
        ConfigurationError: A rank has others than most; on every rank.
    """
    texts = {name: str(fact) for name, fact in {**_versions(), **facts}.items()}
    own = {
        name: text if len(text) < 40 else f"digest {zlib.crc32(text.encode()):08x}"
        for name, text in texts.items()
    }
    everyone = comms.gather_objects(own)
    for name in own:
        found = [item.get(name, "none") for item in everyone]
        usual = Counter(found).most_common(1)[0][0]
        others = {rank: value for rank, value in enumerate(found) if value != usual}
        if others:
            shown = ", ".join(f"rank {rank} has {value}" for rank, value in others.items())
            raise ConfigurationError(
                f"Ranks don't run the same: most have {name} {usual}, but {shown}. Give all nodes "
                "the same code, packages, plan file and options."
            )
