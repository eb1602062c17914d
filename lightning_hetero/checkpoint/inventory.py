"""The layer bitmap: which valid files of which checkpoint each node's tiers hold (AutoHet §IV-C).

Every rank reports its node's own tiers, rank 0 also the remote one. A file counts as held where its
part has a valid manifest and the file has the size that the manifest says; its checksums are
compared when it is read.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

from lightning_hetero.checkpoint.manifest import CheckpointId, PartManifest, name_of_unit
from lightning_hetero.checkpoint.tiers import Tier, TierKind, parts_in, read_manifest
from lightning_hetero.core.table import format_table

__all__ = [
    "HeldPart",
    "Holder",
    "Inventory",
    "complete_checkpoints",
    "format_bitmap",
    "holders_of_files",
    "take_inventory",
]

_READERS = 16


@dataclass(frozen=True, order=True, slots=True)
class Holder:
    """One tier of one node, or a remote tier, which every node reaches."""

    node: str
    """Name of the node; of a remote tier its own name."""
    kind: TierKind

    def __str__(self) -> str:
        if self.kind is TierKind.REMOTE:
            return self.node or "remote"
        return f"{self.node}/{self.kind.name.lower()}"


@dataclass(frozen=True, slots=True)
class HeldPart:
    """One part in one tier."""

    id: CheckpointId
    part: int
    world_size: int
    """Number of parts that the checkpoint has."""
    holder: Holder
    missing: tuple[str, ...]
    """Files of the part that aren't there or have a wrong size."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What one rank reports."""

    held: tuple[HeldPart, ...]
    broken: tuple[str, ...] = ()
    """Manifests that couldn't be read, and why."""

    def encode(self) -> bytes:
        """Return it as JSON."""
        held = [
            [h.id.step, h.id.attempt, h.part, h.world_size, h.holder.node, h.holder.kind, h.missing]
            for h in self.held
        ]
        return json.dumps({"held": held, "broken": self.broken}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Parse what `encode` returns."""
        body: Mapping[str, Any] = json.loads(data)
        return cls(
            held=tuple(
                HeldPart(
                    CheckpointId(step, attempt),
                    part,
                    world_size,
                    Holder(node, TierKind(kind)),
                    tuple(missing),
                )
                for step, attempt, part, world_size, node, kind, missing in body["held"]
            ),
            broken=tuple(body["broken"]),
        )

    @classmethod
    def merge(cls, inventories: Iterable[Self]) -> Self:
        """Return all that any rank reported, once."""
        items = list(inventories)
        held = dict.fromkeys(part for item in items for part in item.held)
        broken = dict.fromkeys(text for item in items for text in item.broken)
        return cls(held=tuple(held), broken=tuple(broken))


def take_inventory(tiers: Sequence[Tier], *, node: str) -> Inventory:
    """Look through tiers; one that can't be listed counts as empty and is reported as broken.

    Args:
        tiers: The node's own tiers and, on one rank, the remote one.
        node: Name of this node.
    """
    held: list[HeldPart] = []
    broken: list[str] = []
    for tier in tiers:
        holder = Holder(tier.name if tier.kind is TierKind.REMOTE else node, tier.kind)
        try:
            files = tier.store.list()
        except Exception as error:
            # Stores raise their client library's own types; other tiers may still answer.
            broken.append(f"{tier}: {error}")
            continue
        wanted = [(id_, part) for id_, parts in parts_in(files).items() for part in parts]
        with ThreadPoolExecutor(_READERS) as pool:
            results = pool.map(lambda pair, tier=tier: _try_manifest(tier, *pair), wanted)
        for result in results:
            if isinstance(result, str):
                broken.append(result)
            else:
                held.append(_held(result, holder, files))
    return Inventory(held=tuple(held), broken=tuple(broken))


def _try_manifest(tier: Tier, checkpoint: CheckpointId, part: int) -> PartManifest | str:
    """Return the manifest, or what is wrong with it."""
    try:
        return read_manifest(tier.store, checkpoint, part)
    except Exception as error:
        # Stores raise their client library's own types.
        return f"part {part} of {checkpoint} in {tier}: {error}"


def _held(manifest: PartManifest, holder: Holder, files: Mapping[str, int]) -> HeldPart:
    folder = manifest.id.folder
    missing = [f.name for f in manifest.files if files.get(f"{folder}/{f.name}") != f.size_bytes]
    return HeldPart(manifest.id, manifest.part, manifest.world_size, holder, tuple(missing))


def complete_checkpoints(inventory: Inventory) -> list[CheckpointId]:
    """Return the checkpoints of which every file of every part is somewhere, newest first."""
    by_id: dict[CheckpointId, dict[int, list[HeldPart]]] = defaultdict(lambda: defaultdict(list))
    for held in inventory.held:
        by_id[held.id][held.part].append(held)
    complete = []
    for checkpoint, parts in by_id.items():
        world_size = next(iter(parts.values()))[0].world_size
        if set(parts) >= set(range(world_size)) and not any(map(_nowhere, parts.values())):
            complete.append(checkpoint)
    return sorted(complete, reverse=True)


def _nowhere(copies: Sequence[HeldPart]) -> set[str]:
    """Return the files that all copies of a part miss."""
    return set.intersection(*(set(copy.missing) for copy in copies))


def holders_of_files(
    inventory: Inventory, manifests: Mapping[int, PartManifest]
) -> dict[tuple[int, str], tuple[Holder, ...]]:
    """Return which tiers hold each (part, file) of one checkpoint."""
    holders: dict[tuple[int, str], list[Holder]] = {
        (part, entry.name): [] for part, manifest in manifests.items() for entry in manifest.files
    }
    for held in inventory.held:
        manifest = manifests.get(held.part)
        if manifest is None or manifest.id != held.id:
            continue
        for entry in manifest.files:
            if entry.name not in held.missing:
                holders[held.part, entry.name].append(held.holder)
    return {key: tuple(sorted(set(items))) for key, items in holders.items()}


def format_bitmap(
    inventory: Inventory, manifests: Mapping[int, PartManifest], checkpoint: CheckpointId
) -> str:
    """Return layers × tiers: `#` all bytes of the layer are there, `+` some, `.` none."""
    places = sorted({held.holder for held in inventory.held if held.id == checkpoint})
    holders = holders_of_files(inventory, manifests)
    total: dict[int, int] = defaultdict(int)
    present: dict[tuple[int, Holder], int] = defaultdict(int)
    for part, manifest in manifests.items():
        for entry in manifest.files:
            if entry.unit is not None:
                total[entry.unit] += entry.size_bytes
                for holder in holders[part, entry.name]:
                    present[entry.unit, holder] += entry.size_bytes
    num_layers = next(iter(manifests.values())).num_layers
    rows = [
        (
            name_of_unit(unit, num_layers),
            f"{total[unit] / 1e6:.2f}",
            *(_mark(present[unit, place], total[unit]) for place in places),
        )
        for unit in sorted(total)
    ]
    return format_table(("layer", "MB", *(str(place) for place in places)), rows)


def _mark(present: int, total: int) -> str:
    if present == total:
        return "#"
    return "+" if present else "."
