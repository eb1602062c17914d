"""The places of one node's checkpoints: write and copy parts, confirm checkpoints, delete old ones.

A checkpoint has one *part* for each rank. A part is *whole* in a place if its manifest is valid and
each file has the size that the manifest says. A checkpoint is *complete* if all places together
have every file of all parts (`inventory`). It is *confirmed* in a tier once all ranks have said
that such tiers have their parts. Two kinds of checkpoints are deleted: those that are older than
the newest confirmed ones, and incomplete ones of this start of the run, which can't become complete
any more. A part's manifest is deleted first, so that a part that is half deleted doesn't count.
"""

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from lightning_hetero.checkpoint.content import CheckpointContent, refuse_nonfinite
from lightning_hetero.checkpoint.deadlines import Followed
from lightning_hetero.checkpoint.encoding import encode_part, make_manifest
from lightning_hetero.checkpoint.manifest import (
    Buffer,
    CheckpointId,
    FileEntry,
    PartManifest,
    fault_in,
    manifest_name,
    parse_manifest_name,
)
from lightning_hetero.checkpoint.serving import Readable
from lightning_hetero.checkpoint.store import Store
from lightning_hetero.core.errors import CheckpointError, ConfigurationError
from lightning_hetero.core.process import Progress

_log = logging.getLogger(__name__)

CONFIRMED = "confirmed"
"""Name of the file that marks a checkpoint as saved by all ranks."""
REJECTED = "rejected"
"""Name of the file that marks a checkpoint as rejected by a user: it isn't used from that place."""

_CHUNK_BYTES = 8 << 20


class TierKind(IntEnum):
    """Kinds of places, from the fastest to the most lasting."""

    LIVE = -1
    """Memory of a rank that trains: ends with the process."""
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

    ::

        disk = Tier(kind=TierKind.DISK, store=LocalStore("/mnt/scratch/run"))
        bucket = Tier(kind=TierKind.REMOTE, store=open_store("s3://bucket/run"), keep=5)
        recovered = Recovery([disk, bucket], node="node-3", peers=peers).recover(needs)
    """

    kind: TierKind
    """How fast and lasting it is."""
    store: Store
    """Where its files are."""
    keep: int = 2
    """Number of complete checkpoints to keep, 1 or more; older ones are deleted."""
    name: str = ""
    """Name that distinguishes several remote tiers; a node's own tiers have the node's name."""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ConfigurationError(
                f"A checkpoint tier keeps {self.keep}; it must keep 1 or more."
            )

    def location(self, node: str) -> Location:
        """Return the location by which all ranks refer to this tier of a node."""
        return Location(self.name if self.kind is TierKind.REMOTE else node, self.kind)

    def is_maintained_by(self, global_rank: int, *, is_first_of_node: bool) -> bool:
        """Whether a rank lists, marks and prunes the tier for all ranks that share it."""
        return global_rank == 0 if self.kind is TierKind.REMOTE else is_first_of_node

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} tier {self.store}"


class Source(IntEnum):
    """The kinds of places that a byte range can be read from, cheapest first."""

    OWN_MEMORY = 0
    OWN_DISK = 1
    PEER_MEMORY = 2
    PEER_DISK = 3
    REMOTE = 4


def source_of(location: Location, node: str) -> Source:
    """Return what kind of source a location is for a node."""
    if location.kind is TierKind.REMOTE:
        return Source.REMOTE
    first = Source.OWN_MEMORY if location.node == node else Source.PEER_MEMORY
    return Source(first + max(location.kind, TierKind.MEMORY))


def own_stores(tiers: Iterable[Tier]) -> dict[str, Store]:
    """Return the stores of a node's own tiers, by the names of their kinds."""
    return {tier.kind.name: tier.store for tier in tiers if tier.kind is not TierKind.REMOTE}


def checkpoints_in(files: Iterable[str]) -> list[CheckpointId]:
    """Return every checkpoint that has any file, complete or not, oldest first."""
    found = {CheckpointId.parse(name.partition("/")[0]) for name in files if "/" in name}
    return sorted(checkpoint for checkpoint in found if checkpoint is not None)


class TornError(CheckpointError):
    """A manifest's content is wrong. Not raised if the store merely doesn't answer."""


def read_manifest(store: Readable, checkpoint: CheckpointId, part: int) -> PartManifest:
    """Read and check one manifest.

    Raises:
        TornError: It is incomplete, has been tampered with, or is another part's.
        OSError: It is missing. Stores may raise their client library's own types.
    """
    name = manifest_name(checkpoint, part)
    data = store.read(name)
    try:
        manifest = PartManifest.decode(data)
        manifest.refuse_forged()
    except CheckpointError as error:
        raise TornError(f"{store}/{name}: {error}") from error
    if (manifest.id, manifest.part) != (checkpoint, part):
        raise TornError(
            f"{store}/{name} is the manifest of part {manifest.part} of {manifest.id}; somebody "
            "moved it. Delete it."
        )
    return manifest


@dataclass(frozen=True)
class StoredPart:
    """One rank's part after `write_part`."""

    manifest: PartManifest
    stores: Mapping[TierKind, Store]
    """The stores that have the part, by kind of tier, fastest first; the remote one only if no own
    tier has it."""
    errors: Sequence[str]
    """For each tier that doesn't have the part, the reason."""


def write_part(
    content: CheckpointContent,
    metadata: Mapping[str, bytes],
    own: Sequence[Tier],
    remote: Tier | None,
    progress: Progress,
) -> StoredPart:
    """Write a part to all own tiers that accept it; if none does, to the remote tier.

    The manifest is written last: until then the part doesn't count. If a tier fails, what it
    already has of the part is deleted, so that a full disk isn't filled with useless files.

    Args:
        content: The state, in host memory.
        metadata: See `encode_part`.
        own: The node's own tiers, fastest first.
        remote: The remote tier, None if there is none.
        progress: Notified of each chunk.

    Raises:
        CheckpointError: The state isn't finite or can't be encoded.
    """
    refuse_nonfinite(content.slices, f"at {content.id}, which is therefore not saved")
    bodies, slices = encode_part(content, metadata)
    folder, errors = content.id.folder, []
    stores: dict[TierKind, Store] = {}
    for tier in (*own, remote):
        if tier is None or (stores and tier is remote):
            continue
        try:
            for body in bodies:
                tier.store.write(f"{folder}/{body.name}", Followed(body, progress))
            _write_manifest(tier.store, make_manifest(content, bodies, slices))
            stores[tier.kind] = tier.store
        except Exception as error:
            # Stores raise many kinds of errors, and the next tier may still accept the part.
            text = f"Rank {content.global_rank} couldn't write {content.id} to {tier}: {error}."
            _log.warning("%s", text)
            errors.append(text)
            # After a tier that has hung, the next one gets the full time again.
            progress.tick()
            names = [f"{folder}/{body.name}" for body in bodies]
            with contextlib.suppress(Exception):
                remove_files(tier.store, [manifest_name(content.id, content.global_rank), *names])
    return StoredPart(make_manifest(content, bodies, slices), stores, errors)


def _write_manifest(store: Store, manifest: PartManifest) -> None:
    store.write(manifest_name(manifest.id, manifest.part), [manifest.encode()])


def copy_part(source: Readable, target: Store, manifest: PartManifest, progress: Progress) -> None:
    """Copy a part between stores; CheckpointError if the source is corrupt."""
    for entry in manifest.files:
        chunks = Followed(StoredFile(source, manifest, entry), progress)
        target.write(f"{manifest.id.folder}/{entry.name}", chunks)
    progress.refuse_if_late()
    _write_manifest(target, manifest)


@dataclass(frozen=True)
class StoredFile:
    """The chunks of a file of a stored part, each of whole blocks; may be iterated several times.

    Raises:
        CheckpointError: A checksum is wrong; the message names the block.
    """

    store: Readable
    manifest: PartManifest
    entry: FileEntry

    def __iter__(self) -> Iterator[Buffer]:
        size, block = self.entry.size_bytes, self.manifest.block_bytes
        step = max(1, _CHUNK_BYTES // block) * block
        for start in range(0, size, step):
            stop = min(start + step, size)
            name = f"{self.manifest.id.folder}/{self.entry.name}"
            chunk = self.store.read(name, start, stop)
            if why := fault_in(chunk, start, stop, self.entry, block):
                raise CheckpointError(f"{self.entry.name} of {self.manifest.id} is corrupt: {why}.")
            yield chunk


def pull_part(
    source: Readable, target: Store, checkpoint: CheckpointId, part: int, progress: Progress
) -> None:
    """Copy another rank's part from where it is served; if that fails, remove what was copied.

    Raises:
        CheckpointError: What is served is corrupt, or of another part or checkpoint.
    """
    manifest = read_manifest(source, checkpoint, part)
    try:
        copy_part(source, target, manifest, progress)
    except BaseException:
        with contextlib.suppress(Exception):
            target.remove([f"{checkpoint.folder}/{entry.name}" for entry in manifest.files])
        raise


def remove_files(store: Store, names: Collection[str]) -> None:
    """Delete files of checkpoints, manifests first."""
    manifests = [name for name in names if parse_manifest_name(name) is not None]
    for some in (manifests, [name for name in names if name not in set(manifests)]):
        if some:
            store.remove(some)


def remove_checkpoints(store: Store, files: Iterable[str], gone: Collection[CheckpointId]) -> None:
    """Delete checkpoints out of a store that holds these files."""
    folders = {item.folder for item in gone}
    remove_files(store, [name for name in files if name.partition("/")[0] in folders])


def confirm(tier: Tier, checkpoint: CheckpointId, busy: Collection[CheckpointId] = ()) -> None:
    """Mark a checkpoint as saved by all ranks in a tier, and delete old ones there.

    The newest `keep` confirmed checkpoints of the run stay, and so do `busy` ones, which are being
    uploaded.
    """
    tier.store.write(f"{checkpoint.folder}/{CONFIRMED}", [b"all ranks have saved it\n"])
    files = tier.store.list()
    older = [i for i in checkpoints_in(files) if i.run == checkpoint.run and i < checkpoint]
    confirmed = [item for item in older if f"{item.folder}/{CONFIRMED}" in files]
    if len(confirmed) + 1 >= tier.keep:
        oldest = [*confirmed, checkpoint][-tier.keep]
        gone = [item for item in older if item < oldest and item not in busy]
        remove_checkpoints(tier.store, files, gone)


def place_replicas(
    node_of_rank: Sequence[str], *, replicas: int, leaving: Collection[str] = ()
) -> tuple[tuple[int, ...], ...]:
    """Return for each rank the ranks of other nodes that keep a copy of its part.

    Nodes form a ring, and each node gives its parts to the nodes that follow it. So if two nodes
    are lost at once, parts are lost only if the two are neighbours in the ring; if copies were
    spread over all nodes, the loss of any two nodes would lose some. Nodes that are `leaving` get
    no copies, and their own parts get at least one. There are fewer copies if there are too few
    nodes.

    Args:
        node_of_rank: Name of each rank's node.
        replicas: Nodes that are to hold each part, its own included.
        leaving: Nodes that are about to be lost.
    """
    if replicas < 1:
        raise ConfigurationError(f"replicas is {replicas}; it must be 1 (no copies) or more.")
    nodes = list(dict.fromkeys(node_of_rank))
    ranks_of = {n: [rank for rank, own in enumerate(node_of_rank) if own == n] for n in nodes}
    targets = []
    for rank, node in enumerate(node_of_rank):
        index = nodes.index(node)
        ring = [other for other in nodes[index + 1 :] + nodes[:index] if other not in leaving]
        chosen = ring[: max(replicas - 1, int(node in leaving))]
        targets.append(tuple(ranks_of[n][rank % len(ranks_of[n])] for n in chosen))
    return tuple(targets)
