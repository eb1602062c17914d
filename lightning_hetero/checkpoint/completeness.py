"""What is complete: decided here alone, for all who list, prune or recover checkpoints.

A part is *whole* in a place where its manifest is valid and every file has the size that the
manifest says. A checkpoint is complete where the places that are looked at together hold every file
of the parts of all ranks. Parts of saves by different numbers of ranks are never counted together.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lightning_hetero.checkpoint.manifest import (
    CheckpointId,
    PartManifest,
    manifest_name,
    parse_manifest_name,
)
from lightning_hetero.checkpoint.store import Store
from lightning_hetero.core.errors import CheckpointError

__all__ = [
    "QUARANTINED",
    "PartCopy",
    "StoreParts",
    "checkpoints_in",
    "complete_size",
    "look_at_parts",
    "parts_in",
    "read_manifest",
]

QUARANTINED = "quarantined"
"""File of a checkpoint that isn't to be trusted in the place where it lies."""

_READERS = 16


@dataclass(frozen=True, slots=True)
class PartCopy:
    """One part in one place, whose manifest is valid."""

    id: CheckpointId
    part: int
    world_size: int
    """Number of parts that the checkpoint has."""
    missing: tuple[str, ...]
    """Files of the part that aren't there or have a wrong size."""


@dataclass(frozen=True, slots=True)
class StoreParts:
    """What a store holds of some checkpoints."""

    copies: tuple[PartCopy, ...]
    broken: tuple[tuple[CheckpointId, str], ...]
    """Manifests that are torn or have gone, and why."""
    unreadable: tuple[tuple[CheckpointId, str], ...]
    """Manifests that the store couldn't give, and why: they may be good."""


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


def read_manifest(store: Store, checkpoint: CheckpointId, part: int) -> PartManifest:
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
    """What a manifest holds is wrong; a store that doesn't answer is another matter."""


def look_at_parts(
    store: Store, files: Mapping[str, int], wanted: Collection[CheckpointId]
) -> StoreParts:
    """Read the manifests of checkpoints, and compare them with the sizes of a store's files.

    What is in quarantine counts as nothing.
    """
    trusted = {item for item in wanted if f"{item.folder}/{QUARANTINED}" not in files}
    names = [
        (id_, part) for id_, parts in parts_in(files).items() if id_ in trusted for part in parts
    ]
    copies: list[PartCopy] = []
    broken: list[tuple[CheckpointId, str]] = []
    unreadable: list[tuple[CheckpointId, str]] = []
    with ThreadPoolExecutor(_READERS) as pool:
        results = pool.map(lambda name: _try_manifest(store, *name), names)
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
    """Return the number of parts of the checkpoint that copies make complete; None if none.

    Args:
        copies: All that is known of one checkpoint, from any places.
    """
    missing: dict[int, dict[int, set[str]]] = defaultdict(dict)
    for copy in copies:
        known = missing[copy.world_size]
        known[copy.part] = known.get(copy.part, set(copy.missing)) & set(copy.missing)
    for world_size, parts in sorted(missing.items()):
        if set(parts) >= set(range(world_size)) and not any(parts.values()):
            return world_size
    return None
