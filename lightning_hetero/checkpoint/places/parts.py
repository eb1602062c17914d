"""Copy parts between places, confirm whole checkpoints of a tier, and delete old ones.

Pruning never touches what might still be a run's newest complete checkpoint: on a node's own tiers,
which hold only some parts, that is what all ranks have *confirmed* and what is whole as far as it
is here; on the remote one, which holds all parts, what is complete there. Deleting takes a part's
manifest before its files, so that what is half deleted doesn't exist.
"""

import contextlib
import itertools
import json
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

from lightning_hetero.checkpoint.format.blocks import BlockChecksums, Buffer
from lightning_hetero.checkpoint.format.manifest import (
    CheckpointId,
    FileEntry,
    PartManifest,
    manifest_name,
    parse_manifest_name,
)
from lightning_hetero.checkpoint.peers.deadlines import Followed
from lightning_hetero.checkpoint.peers.serving import Readable
from lightning_hetero.checkpoint.places.store import Store
from lightning_hetero.checkpoint.places.tiers import (
    CONFIRMED,
    Tier,
    TierKind,
    checkpoints_in,
    complete_size,
    look_at_parts,
    parts_in,
    read_manifest,
)
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.process import Progress

__all__ = ["TierPruner", "copy_part", "prune", "pull_part", "remove_files", "write_manifest"]

_log = logging.getLogger(__name__)
_CHUNK_BYTES = 8 << 20


def write_manifest(store: Store, manifest: PartManifest) -> None:
    """Write a part's manifest, once all its files are written: only then the part exists."""
    store.write(manifest_name(manifest.id, manifest.part), [manifest.encode()])


def copy_part(source: Readable, target: Store, manifest: PartManifest, progress: Progress) -> None:
    """Copy a part between stores; CheckpointError if the source turns out corrupt."""
    for entry in manifest.files:
        chunks = Followed(_StoredFile(source, manifest, entry), progress)
        target.write(f"{manifest.id.folder}/{entry.name}", chunks)
    progress.refuse_if_late()
    write_manifest(target, manifest)


class _StoredFile:
    """The chunks of a stored file, checked against its checksums; may be iterated several times."""

    def __init__(self, store: Readable, manifest: PartManifest, entry: FileEntry) -> None:
        self._store = store
        self._manifest = manifest
        self._entry = entry

    def __iter__(self) -> Iterator[Buffer]:
        chunks = _read_file(self._store, self._manifest, self._entry)
        yield from _checked(chunks, self._manifest, self._entry)


def _read_file(store: Readable, manifest: PartManifest, entry: FileEntry) -> Iterator[bytes]:
    name = f"{manifest.id.folder}/{entry.name}"
    for start in range(0, entry.size_bytes, _CHUNK_BYTES):
        yield store.read(name, start, min(start + _CHUNK_BYTES, entry.size_bytes))


def _checked(
    chunks: Iterable[Buffer], manifest: PartManifest, entry: FileEntry
) -> Iterator[Buffer]:
    """Yield the chunks; raise at the end, before the file exists, if a checksum is wrong."""
    checksums = BlockChecksums(manifest.block_bytes)
    for chunk in chunks:
        checksums.update(chunk)
        yield chunk
    if checksums.finish() != entry.checksums:
        raise CheckpointError(
            f"{entry.name} of {manifest.id} is corrupt at its source; it wasn't copied."
        )


def pull_part(
    source: Readable, target: Store, checkpoint: CheckpointId, part: int, progress: Progress
) -> None:
    """Copy another rank's part from where it is served; remove all if that fails.

    Raises:
        CheckpointError: It is of another part or checkpoint, or corrupt.
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


_Files = Mapping[str, int]
"""A checkpoint's files: size by name."""


def prune(
    tier: Tier,
    *,
    keep: int | None,
    busy: Collection[CheckpointId] = (),
    superseded: Collection[CheckpointId] = (),
    known: dict[CheckpointId, _Files] | None = None,
    newest: CheckpointId | None = None,
) -> list[CheckpointId]:
    """Delete all checkpoints older than a run's newest `keep` complete ones; return the deleted.

    This is done for each run separately: of each run the newest ones stay.

    Args:
        tier: The tier. In a remote one, a checkpoint with all its parts is complete; in a node's
            own, a confirmed one whose parts, as noted and as found here, have all their files.
        keep: Complete checkpoints to keep of each run; None keeps all.
        busy: Checkpoints that are being read; they stay.
        superseded: Checkpoints to delete in any case, unless they are complete.
        known: Files of complete checkpoints. If they are all still there, no manifest is read;
            checkpoints found complete are added.
        newest: Newer ones of its run stay, unread: they are still being confirmed.
    """
    store, shared = tier.store, tier.kind is TierKind.REMOTE
    files = store.list()
    known = {} if known is None else known
    of_folder: dict[str, dict[str, int]] = defaultdict(dict)
    for name, size in files.items():
        of_folder[name.partition("/")[0]][name] = size
    newest_first = checkpoints_in(files)[::-1]

    def is_complete(item: CheckpointId) -> bool:
        own = of_folder[item.folder]
        if known.get(item) != own and _is_complete(store, own, item, shared=shared):
            known[item] = own
        return known.get(item) == own

    gone = {item for item in newest_first if item in superseded and not is_complete(item)}
    for run in {item.run for item in newest_first} if keep is not None else ():
        items = [item for item in newest_first if item.run == run]
        agreed = [
            item for item in items if newest is None or item.run != newest.run or item <= newest
        ]
        # Manifests are read only until enough are found.
        last = next(itertools.islice(filter(is_complete, agreed), (keep or 1) - 1, None), None)
        gone |= {item for item in items if last is not None and item < last}
    gone -= {*busy}
    remove_files(store, [name for item in gone for name in of_folder[item.folder]])
    for item in known.keys() - {*newest_first} | gone:
        known.pop(item, None)
    return sorted(gone)


class TierPruner:
    """Confirms complete checkpoints in one tier and deletes old ones, during a run.

    Checkpoints that ranks have agreed on are recognised by their files' names and sizes. So a save
    costs a constant number of requests, for any number of ranks; only manifests of checkpoints that
    this start of the run hasn't confirmed itself are read, once.

    Args:
        tier: The tier.
        parts: The parts that it must have: of this node's ranks, or of all in a remote tier.
        progress: Ticks with the work.
    """

    def __init__(self, tier: Tier, parts: Collection[int], progress: Progress) -> None:
        self.tier = tier
        self.parts = frozenset(parts)
        self._progress = progress
        self._known: dict[CheckpointId, _Files] = {}

    def commit(
        self,
        complete: CheckpointId | None,
        *,
        keep: int | None,
        busy: Collection[CheckpointId] = (),
        superseded: Collection[CheckpointId] = (),
    ) -> None:
        """Confirm what all ranks say is complete here, and delete old ones; failures are logged."""
        try:
            if complete is not None:
                self._confirm(complete)
            prune(
                self.tier,
                keep=keep,
                busy=busy,
                superseded=superseded,
                known=self._known,
                newest=complete,
            )
        except Exception as error:
            # Stores raise their client library's own types. The next save deletes what is left.
            _log.warning("Couldn't tidy up %s: %s", self.tier, error)
        self._progress.tick()

    def _confirm(self, checkpoint: CheckpointId) -> None:
        """Note that all ranks have saved a checkpoint, and which parts are here."""
        name = f"{checkpoint.folder}/{CONFIRMED}"
        files = self.tier.store.list()
        self._progress.tick()
        own = {key: size for key, size in files.items() if key.startswith(f"{checkpoint.folder}/")}
        parts = parts_in(own).get(checkpoint, [])
        text = json.dumps({"parts": parts}).encode()
        self.tier.store.write(name, [text])
        if self.parts <= {*parts}:
            self._known[checkpoint] = {**own, name: len(text)}

    def holds(self, checkpoint: CheckpointId) -> bool:
        """Check again whether the tier has all parts that it must have, with all their files."""
        try:
            files = self.tier.store.list()
            found = look_at_parts(self.tier.store, files, [checkpoint], self._progress)
        except Exception as error:
            # Stores raise their client library's own types; another tier may have it all.
            _log.warning("Couldn't look into %s again: %s", self.tier, error)
            return False
        return self.parts <= {copy.part for copy in found.copies if not copy.missing}


def _is_complete(store: Store, files: _Files, checkpoint: CheckpointId, *, shared: bool) -> bool:
    """Return whether a store has everything that it should have of a checkpoint."""
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
