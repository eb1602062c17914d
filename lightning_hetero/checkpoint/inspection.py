"""What checkpoints there are and in which state, for people to read."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_hetero.checkpoint.blocks import first_corrupt_block
from lightning_hetero.checkpoint.choice import choose_run
from lightning_hetero.checkpoint.completeness import read_manifest
from lightning_hetero.checkpoint.inventory import (
    Holder,
    Inventory,
    complete_checkpoints,
    holders_of_files,
    take_inventory,
)
from lightning_hetero.checkpoint.manifest import (
    CheckpointId,
    FileEntry,
    PartManifest,
    name_of_unit,
)
from lightning_hetero.checkpoint.recovery_plan import FileRange, plan_fetches
from lightning_hetero.checkpoint.store import Store
from lightning_hetero.checkpoint.tiers import Tier, TierKind
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.table import format_table

__all__ = ["View", "describe_plan", "list_checkpoints", "look", "verify"]

_BLOCKS_AT_A_TIME = 16
_NODE = "here"
_LOOKS = 20
"""Times to look again where a run that still writes deletes what was seen."""


@dataclass(frozen=True, kw_only=True)
class View:
    """One checkpoint in several places."""

    id: CheckpointId
    inventory: Inventory
    manifests: Mapping[int, PartManifest]
    """All parts that have a valid manifest anywhere."""

    @property
    def world_size(self) -> int:
        """Number of parts that the checkpoint should have."""
        return next(iter(self.manifests.values())).world_size


def look(tiers: Sequence[Tier], *, step: int | None = None) -> View:
    """Return the newest complete checkpoint, or the newest of a step, complete or not.

    Raises:
        CheckpointError: There is none.
    """
    for _ in range(_LOOKS):
        inventory = take_inventory(tiers, node=_NODE)
        try:
            return _look_at(inventory, tiers, step)
        except (CheckpointError, OSError):
            # What was seen may be gone because a run that still writes has pruned it meanwhile.
            if take_inventory(tiers, node=_NODE) == inventory:
                raise
    return _look_at(take_inventory(tiers, node=_NODE), tiers, step)


def _look_at(inventory: Inventory, tiers: Sequence[Tier], step: int | None) -> View:
    closed = [why for item, why in inventory.unreadable if item is None]
    if closed:
        raise CheckpointError(
            f"Can't look into {'; '.join(closed)}. Leave it out to look at the others alone."
        )
    known = sorted({held.id for held in inventory.held}, reverse=True)
    complete = complete_checkpoints(inventory)
    if step is None:
        run = choose_run(inventory)
        wanted = [item for item in complete if item.run == run]
    else:
        wanted = [item for item in known if item.step == step]
        wanted.sort(key=lambda item: item in complete, reverse=True)
    if not wanted:
        places = ", ".join(str(tier.store) for tier in tiers)
        what = "complete checkpoint" if step is None else f"checkpoint of step {step}"
        steps = f"there are steps {[item.step for item in known]}" if known else "nothing is there"
        bad = (*inventory.broken, *(why for _, why in inventory.unreadable))
        broken = "".join(f" Broken: {item.rstrip('.')}." for item in bad)
        raise CheckpointError(f"There is no {what} in {places}; {steps}.{broken}")
    size = complete.get(wanted[0])
    manifests: dict[int, PartManifest] = {}
    for held in inventory.held:
        if held.id == wanted[0] and held.part not in manifests and size in (None, held.world_size):
            store = _tier_of(held.holder, tiers).store
            manifests[held.part] = read_manifest(store, held.id, held.part)
    return View(id=wanted[0], inventory=inventory, manifests=manifests)


def list_checkpoints(tiers: Sequence[Tier]) -> str:
    """Return one line for each checkpoint, the newest first, whatever is left of it."""
    inventory = take_inventory(tiers, node=_NODE)
    complete = complete_checkpoints(inventory)
    present = sorted({item for item, _ in inventory.present}, reverse=True)
    several = len({item.run for item in present}) > 1
    rows = []
    for item in present:
        held = [part for part in inventory.held if part.id == item]
        parts = f"{len({part.part for part in held})}/{held[0].world_size if held else '?'}"
        places = ", ".join(sorted({str(at) for found, at in inventory.present if found == item}))
        verdict = "yes" if item in complete else "no"
        row = (str(item.step), str(item.attempt), parts, verdict, places)
        rows.append((*row, item.run) if several else row)
    header = ("step", "attempt", "parts", "complete", "in", *(("run",) if several else ()))
    table = format_table(header, rows) if rows else "no checkpoints"
    return "\n".join([table, *inventory.broken, *(why for _, why in inventory.unreadable)])


def describe_plan(view: View) -> str:
    """Return from where each layer would be read, for a reader that reaches every place."""
    holders = holders_of_files(view.inventory, view.manifests)
    needs = [
        FileRange(part, entry.name, 0, entry.size_bytes)
        for part, manifest in sorted(view.manifests.items())
        for entry in manifest.files
        if holders[part, entry.name]
    ]
    size: dict[int, dict[Holder, int]] = defaultdict(lambda: defaultdict(int))
    for fetch in plan_fetches({0: needs}, view.manifests, holders, [_NODE]):
        unit = view.manifests[fetch.range.part].file(fetch.range.file).unit
        if unit is not None:
            size[unit][fetch.holder] += fetch.range.stop - fetch.range.start
    lost: dict[int, int] = defaultdict(int)
    for (part, name), items in holders.items():
        entry = view.manifests[part].file(name)
        if not items and entry.unit is not None:
            lost[entry.unit] += entry.size_bytes
    num_layers = next(iter(view.manifests.values())).num_layers
    rows = []
    for unit in sorted({*size, *lost}):
        sources = [f"{n / 1e6:.2f} MB from {h}" for h, n in sorted(size[unit].items())]
        if lost[unit]:
            sources.append(f"{lost[unit] / 1e6:.2f} MB nowhere")
        rows.append((name_of_unit(unit, num_layers), ", ".join(sources)))
    return format_table(("layer", "recovered from"), rows)


def verify(view: View, tiers: Sequence[Tier]) -> list[str]:
    """Read every copy of a checkpoint; return one line for each file that is broken."""
    damage = [text for text in view.inventory.broken if view.id.folder in text]
    for held in view.inventory.held:
        if held.id != view.id:
            continue
        manifest = view.manifests[held.part]
        store = _tier_of(held.holder, tiers).store
        damage += [f"{store}/{view.id.folder}/{name}: missing or cut" for name in held.missing]
        for entry in manifest.files:
            if entry.name not in held.missing:
                damage += _damage_of(store, manifest, entry)
    lost = sorted(set(range(view.world_size)) - set(view.manifests))
    if lost:
        damage.append(f"{view.id} has no valid manifest of parts {lost}")
    return damage


def _damage_of(store: Store, manifest: PartManifest, entry: FileEntry) -> Iterator[str]:
    step = manifest.block_bytes * _BLOCKS_AT_A_TIME
    name = f"{manifest.id.folder}/{entry.name}"
    unit = "metadata" if entry.unit is None else name_of_unit(entry.unit, manifest.num_layers)
    for start in range(0, entry.size_bytes, step):
        try:
            data = store.read(name, start, min(start + step, entry.size_bytes))
        except Exception as error:
            # Stores raise their client library's own types.
            yield f"{store}/{name}: {unit}: {error}"
            return
        block = first_corrupt_block(data, start, entry.checksums, block_bytes=manifest.block_bytes)
        if block is not None:
            yield f"{store}/{name}: {unit}: the checksum of block {block} is wrong"
            return


def _tier_of(holder: Holder, tiers: Sequence[Tier]) -> Tier:
    for tier in tiers:
        if tier.kind is holder.kind and (
            tier.kind is not TierKind.REMOTE or tier.name == holder.node
        ):
            return tier
    raise AssertionError(f"{holder} came from one of the tiers")
