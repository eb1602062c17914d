"""The places of one node's checkpoints, fastest first, and how much of the past each keeps.

Deleting takes a part's manifest before its files, so that what is half deleted doesn't exist.
Pruning never touches what might still be the newest complete checkpoint: on a node's own tiers,
which hold only some parts, that is what all ranks have *confirmed*; on the remote one, which holds
all parts, what is complete there.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum

from lightning_hetero.checkpoint.manifest import (
    CheckpointId,
    PartManifest,
    manifest_name,
    parse_manifest_name,
)
from lightning_hetero.checkpoint.store import Store
from lightning_hetero.core.errors import CheckpointError, ConfigurationError

__all__ = [
    "Tier",
    "TierKind",
    "checkpoints_in",
    "confirm",
    "parts_in",
    "prune",
    "read_manifest",
    "remove_files",
]

_CONFIRMED = "confirmed"


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
    required: bool = True
    """Whether a failed write ends training at the next save; else it is only logged."""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ConfigurationError(
                f"A checkpoint tier keeps {self.keep}; it must keep 1 or more."
            )

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} tier {self.store}"


def checkpoints_in(files: Mapping[str, int]) -> list[CheckpointId]:
    """Return every checkpoint that has any file, complete or not, oldest first."""
    found = {CheckpointId.parse(name.partition("/")[0]) for name in files}
    return sorted(checkpoint for checkpoint in found if checkpoint is not None)


def parts_in(files: Mapping[str, int]) -> dict[CheckpointId, list[int]]:
    """Return the parts that have a manifest, valid or not."""
    parts: dict[CheckpointId, list[int]] = defaultdict(list)
    for name in sorted(files):
        parsed = parse_manifest_name(name)
        if parsed is not None:
            parts[parsed[0]].append(parsed[1])
    return dict(parts)


def read_manifest(store: Store, checkpoint: CheckpointId, part: int) -> PartManifest:
    """Read and check one manifest; CheckpointError or OSError if it is torn or missing."""
    name = manifest_name(checkpoint, part)
    try:
        manifest = PartManifest.decode(store.read(name))
    except CheckpointError as error:
        raise CheckpointError(f"{store}/{name}: {error}") from error
    if (manifest.id, manifest.part) != (checkpoint, part):
        raise CheckpointError(
            f"{store}/{name} is the manifest of part {manifest.part} of {manifest.id}; somebody "
            "moved it. Delete it."
        )
    return manifest


def confirm(store: Store, checkpoint: CheckpointId) -> None:
    """Note in a node's tier that all ranks have saved this checkpoint."""
    store.write(f"{checkpoint.folder}/{_CONFIRMED}", [b"all parts were saved\n"])


def remove_files(store: Store, names: Collection[str]) -> None:
    """Delete files of checkpoints, manifests first."""
    manifests = [name for name in names if parse_manifest_name(name) is not None]
    for some in (manifests, [name for name in names if name not in set(manifests)]):
        if some:
            store.remove(some)


def prune(
    store: Store, *, keep: int, shared: bool, busy: Collection[CheckpointId] = ()
) -> list[CheckpointId]:
    """Delete all that is older than the newest `keep` complete checkpoints; return what went.

    Args:
        store: The tier's store.
        keep: Complete checkpoints to keep.
        shared: Whether the store holds all parts (remote), so that completeness shows in it; else
            only what `confirm` noted counts as complete.
        busy: Checkpoints that are being read.
    """
    files = store.list()
    present = checkpoints_in(files)
    complete = [
        checkpoint
        for checkpoint in present
        if (
            _has_all_parts(store, checkpoint, parts_in(files).get(checkpoint, []))
            if shared
            else f"{checkpoint.folder}/{_CONFIRMED}" in files
        )
    ]
    if len(complete) < keep:
        return []
    oldest_kept = complete[-keep]
    gone = [item for item in present if item < oldest_kept and item not in busy]
    folders = {checkpoint.folder for checkpoint in gone}
    remove_files(store, [name for name in files if name.partition("/")[0] in folders])
    return gone


def _has_all_parts(store: Store, checkpoint: CheckpointId, parts: Collection[int]) -> bool:
    if not parts:
        return False
    try:
        world_size = read_manifest(store, checkpoint, min(parts)).world_size
    except (CheckpointError, OSError):
        return False
    return set(range(world_size)) <= set(parts)
