"""The places of one node's checkpoints, fastest first, and how much of the past each keeps.

Deleting takes a part's manifest before its files, so that what is half deleted doesn't exist.
Pruning never touches what might still be a run's newest complete checkpoint (`completeness`): on a
node's own tiers, which hold only some parts, that is what all ranks have *confirmed* and what is
whole as far as it is here; on the remote one, which holds all parts, what is complete there.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum

from lightning_hetero.checkpoint.completeness import (
    checkpoints_in,
    complete_size,
    look_at_parts,
    parts_in,
)
from lightning_hetero.checkpoint.manifest import CheckpointId, parse_manifest_name
from lightning_hetero.checkpoint.store import Store
from lightning_hetero.core.errors import ConfigurationError

__all__ = ["CONFIRMED", "Tier", "TierKind", "confirm", "prune", "remove_files"]

CONFIRMED = "confirmed"
"""File of a checkpoint that all ranks have saved."""


class TierKind(IntEnum):
    """What a tier survives, and with it its speed."""

    MEMORY = 0
    """Shared memory of the node: survives the process."""
    DISK = 1
    """Local disk: survives a reboot."""
    REMOTE = 2
    """One store for all nodes: survives the node."""


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One place to keep checkpoints."""

    kind: TierKind
    """How fast and lasting it is."""
    store: Store
    """Where its files are."""
    keep: int = 2
    """Complete checkpoints to keep, 1 or more; older ones are deleted."""
    name: str = ""
    """Tells several remote tiers apart; a node's own tiers go by the node's name."""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ConfigurationError(
                f"A checkpoint tier keeps {self.keep}; it must keep 1 or more."
            )

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} tier {self.store}"


def confirm(store: Store, checkpoint: CheckpointId) -> None:
    """Note in a tier that all ranks have saved this checkpoint, and which parts are here."""
    parts = parts_in(store.list()).get(checkpoint, [])
    store.write(f"{checkpoint.folder}/{CONFIRMED}", [json.dumps({"parts": parts}).encode()])


def remove_files(store: Store, names: Collection[str]) -> None:
    """Delete files of checkpoints, manifests first."""
    manifests = [name for name in names if parse_manifest_name(name) is not None]
    for some in (manifests, [name for name in names if name not in set(manifests)]):
        if some:
            store.remove(some)


def prune(
    store: Store,
    *,
    keep: int | None,
    shared: bool,
    busy: Collection[CheckpointId] = (),
    superseded: Collection[CheckpointId] = (),
) -> list[CheckpointId]:
    """Delete all that is older than a run's newest `keep` complete checkpoints; return what went.

    Other runs' checkpoints are none of its business: of each run the newest ones stay.

    Args:
        store: The tier's store.
        keep: Complete checkpoints to keep; None keeps all.
        shared: Whether the store holds all parts (remote), so that completeness shows in it; else
            only what `confirm` noted, and is whole as far as it is here, counts as complete.
        busy: Checkpoints that are being read.
        superseded: What goes in any case where it isn't complete.
    """
    files = store.list()
    by_run: dict[str, list[CheckpointId]] = defaultdict(list)
    for checkpoint in reversed(checkpoints_in(files)):
        by_run[checkpoint.run].append(checkpoint)
    gone: list[CheckpointId] = []
    for newest_first in by_run.values():
        # Manifests are read only until enough are found.
        complete = (
            item for item in newest_first if _is_complete(store, files, item, shared=shared)
        )
        last = None if keep is None else next(itertools.islice(complete, keep - 1, None), None)
        gone += [item for item in newest_first if last is not None and item < last]
        gone += [
            item
            for item in newest_first
            if item in superseded and not _is_complete(store, files, item, shared=shared)
        ]
    gone = sorted({*gone} - {*busy})
    folders = {checkpoint.folder for checkpoint in gone}
    remove_files(store, [name for name in files if name.partition("/")[0] in folders])
    return gone


def _is_complete(
    store: Store, files: Mapping[str, int], checkpoint: CheckpointId, *, shared: bool
) -> bool:
    """Return whether all that a store should hold of a checkpoint is there."""
    if not shared and f"{checkpoint.folder}/{CONFIRMED}" not in files:
        return False
    found = look_at_parts(store, files, [checkpoint])
    if shared:
        return complete_size(found.copies) is not None
    whole = {copy.part for copy in found.copies if not copy.missing}
    return whole >= {*parts_in(files).get(checkpoint, ()), *_confirmed_parts(store, checkpoint)}


def _confirmed_parts(store: Store, checkpoint: CheckpointId) -> set[int]:
    try:
        return set(json.loads(store.read(f"{checkpoint.folder}/{CONFIRMED}"))["parts"])
    except (OSError, ValueError, KeyError, TypeError):
        # Torn: what its parts were can't be known, so it shouldn't replace an older one.
        return {-1}
