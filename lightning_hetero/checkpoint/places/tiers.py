"""The places of one node's checkpoints: what they hold, and which checkpoints are complete.

Only this module decides what is complete, for all code that lists, prunes or recovers checkpoints.
A part is *whole* in a place if its manifest is valid and every file has the manifest's size. A
checkpoint is *complete* if the places under consideration together hold every file of all ranks'
parts. Parts of saves by different numbers of ranks are never counted together.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from lightning_hetero.checkpoint.format.manifest import (
    CheckpointId,
    PartManifest,
    manifest_name,
    parse_manifest_name,
)
from lightning_hetero.checkpoint.peers.deadlines import map_on_threads
from lightning_hetero.checkpoint.peers.serving import Readable
from lightning_hetero.checkpoint.places.store import Store
from lightning_hetero.core.errors import CheckpointError, ConfigurationError
from lightning_hetero.core.process import Progress

__all__ = [
    "CONFIRMED",
    "REJECTED",
    "Location",
    "PartCopy",
    "Source",
    "StoreParts",
    "Tier",
    "TierKind",
    "checkpoints_in",
    "complete_size",
    "look_at_parts",
    "own_stores",
    "parts_in",
    "read_manifest",
    "source_of",
]

CONFIRMED = "confirmed"
"""File of a checkpoint that all ranks have saved."""


class TierKind(IntEnum):
    """Kinds of places, from the fastest to the one that survives most."""

    LIVE = -1
    """What a rank trains with: ends with the process."""
    MEMORY = 0
    """Shared memory of the node: survives the process."""
    DISK = 1
    """Local disk: survives a reboot."""
    REMOTE = 2
    """One store for all nodes: survives the node."""


@dataclass(frozen=True, order=True, slots=True)
class Location:
    """One tier of one node, or a remote tier, which every node reaches."""

    node: str
    """Name of the node; for a remote tier the tier's own name."""
    kind: TierKind

    def __str__(self) -> str:
        if self.kind is TierKind.REMOTE:
            return self.node or "remote"
        return f"{self.node}/{self.kind.name.lower()}"


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One place to keep checkpoints.

    disk = Tier(kind=TierKind.DISK, store=LocalStore("/mnt/scratch/run"))
    bucket = Tier(kind=TierKind.REMOTE, store=open_store("s3://bucket/run"), keep=5)
    recovered = recover(needs, [disk, bucket], node="node-3", peers=peers)
    """

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

    def location(self, node: str) -> Location:
        """Return how all ranks call this tier of a node."""
        return Location(self.name if self.kind is TierKind.REMOTE else node, self.kind)

    def is_looked_after_by(self, global_rank: int, *, is_first_of_node: bool) -> bool:
        """Return whether a rank lists, marks and prunes the tier for all that share it."""
        return global_rank == 0 if self.kind is TierKind.REMOTE else is_first_of_node

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} tier {self.store}"


_SOMEWHERE = Location("", TierKind.REMOTE)


class Source(IntEnum):
    """Where a byte range comes from, cheapest first."""

    OWN_MEMORY = 0
    OWN_DISK = 1
    PEER_MEMORY = 2
    PEER_DISK = 3
    REMOTE = 4


def source_of(location: Location, node: str) -> Source:
    """Return which kind of source a location is for a node."""
    if location.kind is TierKind.REMOTE:
        return Source.REMOTE
    first = Source.OWN_MEMORY if location.node == node else Source.PEER_MEMORY
    return Source(first + max(location.kind, TierKind.MEMORY))


REJECTED = "rejected"
"""File of a checkpoint that a user has rejected: its copy in that place isn't used any more."""

_READERS = 16


@dataclass(frozen=True, slots=True)
class PartCopy:
    """One part in one place, with a valid manifest."""

    id: CheckpointId
    part: int
    world_size: int
    """Number of parts that the checkpoint has."""
    missing: tuple[str, ...]
    """Files of the part that aren't there or have a wrong size."""
    location: Location = _SOMEWHERE
    """The tier that it is in, if several are considered."""


@dataclass(frozen=True, slots=True)
class StoreParts:
    """Parts of some checkpoints that a store holds."""

    copies: tuple[PartCopy, ...]
    broken: tuple[tuple[CheckpointId, str], ...]
    """Manifests that are torn or have vanished, and why."""
    unreadable: tuple[tuple[CheckpointId, str], ...]
    """Manifests that the store couldn't read, and why: they may be good."""


def own_stores(tiers: Iterable[Tier]) -> dict[str, Store]:
    """Return the stores of a node's own tiers, by the names of their kinds."""
    return {tier.kind.name: tier.store for tier in tiers if tier.kind is not TierKind.REMOTE}


def checkpoints_in(files: Iterable[str]) -> list[CheckpointId]:
    """Return every checkpoint that has any file, complete or not, oldest first."""
    found = {CheckpointId.parse(name.partition("/")[0]) for name in files if "/" in name}
    return sorted(checkpoint for checkpoint in found if checkpoint is not None)


def parts_in(files: Iterable[str]) -> dict[CheckpointId, list[int]]:
    """Return the parts that have a manifest, valid or not."""
    parts: dict[CheckpointId, list[int]] = defaultdict(list)
    for name in sorted(files):
        parsed = parse_manifest_name(name)
        if parsed is not None:
            parts[parsed[0]].append(parsed[1])
    return dict(parts)


def read_manifest(store: Readable, checkpoint: CheckpointId, part: int) -> PartManifest:
    """Read and check one manifest.

    Raises:
        CheckpointError: It is torn, or another part's.
        OSError: It is missing. Stores may raise their client library's own types.
    """
    name = manifest_name(checkpoint, part)
    data = store.read(name)
    try:
        manifest = PartManifest.decode(data)
    except CheckpointError as error:
        raise _TornError(f"{store}/{name}: {error}") from error
    if (manifest.id, manifest.part) != (checkpoint, part):
        raise _TornError(
            f"{store}/{name} is the manifest of part {manifest.part} of {manifest.id}; somebody "
            "moved it. Delete it."
        )
    return manifest


class _TornError(CheckpointError):
    """A manifest's content is wrong; not raised if only the store doesn't answer."""


def look_at_parts(
    store: Store,
    files: Mapping[str, int],
    wanted: Collection[CheckpointId],
    progress: Progress | None = None,
) -> StoreParts:
    """Read the manifests of checkpoints, and compare them with the sizes of a store's files.

    Rejected checkpoints count as absent. `progress` ticks with every manifest.
    """
    trusted = {item for item in wanted if f"{item.folder}/{REJECTED}" not in files}
    names = [
        (id_, part) for id_, parts in parts_in(files).items() if id_ in trusted for part in parts
    ]
    copies: list[PartCopy] = []
    broken: list[tuple[CheckpointId, str]] = []
    unreadable: list[tuple[CheckpointId, str]] = []
    results = map_on_threads(
        lambda name: _try_manifest(store, *name),
        names,
        count=min(_READERS, len(names)),
        progress=progress or Progress(),
    )
    for (checkpoint, part), result in zip(names, results, strict=True):
        if isinstance(result, PartManifest):
            copies.append(_copy_of(result, files))
        else:
            is_bad = isinstance(result, _TornError | FileNotFoundError)
            why = f"part {part} of {checkpoint} in {store}: {result}"
            (broken if is_bad else unreadable).append((checkpoint, why))
    return StoreParts(tuple(copies), tuple(broken), tuple(unreadable))


def _try_manifest(store: Store, checkpoint: CheckpointId, part: int) -> PartManifest | Exception:
    try:
        return read_manifest(store, checkpoint, part)
    except Exception as error:
        # Stores raise their client library's own types.
        return error


def _copy_of(manifest: PartManifest, files: Mapping[str, int]) -> PartCopy:
    folder = manifest.id.folder
    missing = [f.name for f in manifest.files if files.get(f"{folder}/{f.name}") != f.size_bytes]
    return PartCopy(manifest.id, manifest.part, manifest.world_size, tuple(missing))


def complete_size(copies: Iterable[PartCopy]) -> int | None:
    """Return the number of parts of a checkpoint if copies make it complete, else None.

    Args:
        copies: All known copies of one checkpoint's parts, from any places.
    """
    missing: dict[int, dict[int, set[str]]] = defaultdict(dict)
    for copy in copies:
        known = missing[copy.world_size]
        known[copy.part] = known.get(copy.part, set(copy.missing)) & set(copy.missing)
    for world_size, parts in sorted(missing.items()):
        if set(parts) >= set(range(world_size)) and not any(parts.values()):
            return world_size
    return None
