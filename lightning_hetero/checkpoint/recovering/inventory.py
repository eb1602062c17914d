"""The layer bitmap: which valid files of which checkpoint each node's tiers hold (AutoHet §IV-C).

Every rank reports its node's own tiers, rank 0 also the remote one. What is complete is decided by
`tiers`; checksums of files are compared when they are read.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from lightning_hetero.checkpoint.claims import RUN_FILE, read_run
from lightning_hetero.checkpoint.deadlines import Deadline, Progress, map_on_threads
from lightning_hetero.checkpoint.manifest import CheckpointId, PartManifest
from lightning_hetero.checkpoint.tiers import (
    CONFIRMED,
    QUARANTINED,
    Holder,
    PartCopy,
    Tier,
    TierKind,
    checkpoints_in,
    complete_size,
    look_at_parts,
)

__all__ = ["Inventory", "complete_checkpoints", "holders_of_files", "take_inventory"]

_STALL_S = 300.0
"""Seconds after which a place that doesn't answer is given up."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """One rank's report of what tiers hold; nothing twice."""

    held: tuple[PartCopy, ...] = ()
    present: tuple[tuple[CheckpointId, Holder], ...] = ()
    """Checkpoints of which there is any file, complete or not."""
    finished: tuple[tuple[CheckpointId, TierKind], ...] = ()
    """Checkpoints that were complete once, confirmed or damaged since, and in what kind of tier."""
    places: tuple[tuple[Holder, str | None], ...] = ()
    """Places that answered, and the run that each says it belongs to."""
    broken: tuple[str, ...] = ()
    """Manifests that are torn, and why."""
    unreadable: tuple[tuple[CheckpointId | None, str], ...] = ()
    """Places and manifests that should be readable and weren't, and why; they may be good."""

    def encode(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(
            [getattr(self, item.name) for item in fields(self)], default=_to_json
        ).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Parse what `encode` returns."""
        body = json.loads(data, object_hook=_from_json)
        return cls(*(tuple(_as_tuple(entry) for entry in items) for items in body))

    @classmethod
    def merge(cls, inventories: Iterable[Self]) -> Self:
        """Return all that any rank reported, once, in an order that two looks have in common."""
        items = list(inventories)

        def all_of(name: str) -> tuple[Any, ...]:
            found = {entry for item in items for entry in getattr(item, name)}
            return tuple(sorted(found, key=repr))

        return cls(**{field.name: all_of(field.name) for field in fields(cls)})


def _to_json(item: CheckpointId | Holder | PartCopy) -> dict[str, Any]:
    if isinstance(item, CheckpointId):
        return {"id": item.folder}
    return {type(item).__name__: [getattr(item, name) for name in item.__slots__]}


def _from_json(data: dict[str, Any]) -> Any:
    ((kind, body),) = data.items()
    if kind == "id":
        return CheckpointId.parse(body)
    if kind == "Holder":
        return Holder(body[0], TierKind(body[1]))
    return PartCopy(*map(_as_tuple, body))


def _as_tuple(item: Any) -> Any:
    return tuple(item) if isinstance(item, list) else item


def take_inventory(
    tiers: Sequence[Tier], *, node: str, progress: Progress | None = None
) -> Inventory:
    """Look through tiers side by side; what can't be read, or hangs, is reported as such.

    Args:
        tiers: The node's own tiers and, on one rank, the remote one.
        node: Name of this node.
        progress: Is told of everything that is read.
    """

    def look(tier: Tier) -> Inventory:
        def take(own: Progress) -> Inventory:
            own.part_of = progress
            return _take_one(tier, tier.holder(node), own)

        try:
            return Deadline(_STALL_S).run(take)
        except Exception as error:
            # Stores raise their client library's own types.
            return Inventory(unreadable=((None, f"{tier}: {error}"),))

    return Inventory.merge(map_on_threads(look, tiers, count=len(tiers), progress=Progress()))


def _take_one(tier: Tier, holder: Holder, progress: Progress) -> Inventory:
    files = tier.store.list()
    progress.tick()
    run = read_run(tier.store) if RUN_FILE in files else None
    present = checkpoints_in(files)
    found = look_at_parts(tier.store, files, present, progress)
    marks = (CONFIRMED, QUARANTINED)
    finished = {item for item in present if any(f"{item.folder}/{mark}" in files for mark in marks)}
    # Files are written before their manifest, each whole or not at all: this was done by no crash.
    finished |= {copy.id for copy in found.copies if copy.missing} | {
        id_ for id_, _ in found.broken
    }
    return Inventory(
        held=tuple(replace(copy, holder=holder) for copy in found.copies),
        present=tuple((item, holder) for item in present),
        finished=tuple((item, tier.kind) for item in finished),
        places=((holder, run),),
        broken=(
            *(why for _, why in found.broken),
            *(
                f"{item} in {tier} failed on probation after a recovery and is put aside; delete "
                f"{item.folder}/{QUARANTINED} there to use it all the same"
                for item in present
                if f"{item.folder}/{QUARANTINED}" in files
            ),
        ),
        unreadable=found.unreadable,
    )


def complete_checkpoints(inventory: Inventory) -> dict[CheckpointId, int]:
    """Return the complete checkpoints, newest first, with the numbers of their parts."""
    copies: dict[CheckpointId, list[PartCopy]] = defaultdict(list)
    for held in inventory.held:
        copies[held.id].append(held)
    sizes = {checkpoint: complete_size(copies[checkpoint]) for checkpoint in copies}
    return {item: size for item, size in sorted(sizes.items(), reverse=True) if size is not None}


def holders_of_files(
    inventory: Inventory, manifests: Mapping[int, PartManifest]
) -> dict[tuple[int, str], tuple[Holder, ...]]:
    """Return which tiers hold each (part, file) of one checkpoint."""
    holders: dict[tuple[int, str], list[Holder]] = {
        (part, entry.name): [] for part, manifest in manifests.items() for entry in manifest.files
    }
    for held in inventory.held:
        manifest = manifests.get(held.part)
        if manifest is None or (manifest.id, manifest.world_size) != (held.id, held.world_size):
            continue
        for entry in manifest.files:
            if entry.name not in held.missing:
                holders[held.part, entry.name].append(held.holder)
    return {key: tuple(sorted(set(items))) for key, items in holders.items()}
