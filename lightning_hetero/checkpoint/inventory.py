"""The layer bitmap: which valid files of which checkpoint each node's tiers hold (AutoHet §IV-C).

Every rank reports its node's own tiers, rank 0 also the remote one. A file counts as held where its
part has a valid manifest and the file has the size that the manifest says; its checksums are
compared when it is read.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from lightning_hetero.checkpoint.completeness import (
    PartCopy,
    checkpoints_in,
    complete_size,
    look_at_parts,
)
from lightning_hetero.checkpoint.manifest import CheckpointId, PartManifest, name_of_unit
from lightning_hetero.checkpoint.tiers import Tier, TierKind
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
class HeldPart(PartCopy):
    """One part in one tier."""

    holder: Holder


@dataclass(frozen=True, slots=True)
class Inventory:
    """What one rank reports."""

    held: tuple[HeldPart, ...]
    broken: tuple[str, ...] = ()
    """Manifests that couldn't be read, and why."""

    def encode(self) -> bytes:
        """Return it as JSON."""
        held = [
            [h.id.folder, h.part, h.world_size, h.missing, h.holder.node, h.holder.kind]
            for h in self.held
        ]
        return json.dumps({"held": held, "broken": self.broken}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Parse what `encode` returns."""
        body: Mapping[str, Any] = json.loads(data)
        return cls(
            held=tuple(
                HeldPart(id_, part, world_size, tuple(missing), Holder(node, TierKind(kind)))
                for folder, part, world_size, missing, node, kind in body["held"]
                if (id_ := CheckpointId.parse(folder)) is not None
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
        found = look_at_parts(tier.store, files, checkpoints_in(files))
        held += [HeldPart(c.id, c.part, c.world_size, c.missing, holder) for c in found.copies]
        broken += [why for _, why in (*found.broken, *found.unreadable)]
    return Inventory(held=tuple(held), broken=tuple(broken))


def complete_checkpoints(inventory: Inventory) -> dict[CheckpointId, int]:
    """Return the complete checkpoints, newest first, with the numbers of their parts."""
    copies: dict[CheckpointId, list[HeldPart]] = defaultdict(list)
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
