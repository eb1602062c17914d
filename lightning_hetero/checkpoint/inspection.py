"""Checkpoints outside of training: list, look into, verify, export, reject and delete them.

Export puts all slices together into one file with `state_dict`, `optimizer_states` and whatever the
metadata holds, which `LightningModule.load_from_checkpoint` and `Trainer.fit(ckpt_path=...)` on one
device read. Optimizer state is keyed by parameter names here and by running numbers there.
"""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_hetero.checkpoint.content import (
    SliceNeed,
    num_rows,
    optimizer_state_dict,
)
from lightning_hetero.checkpoint.fetching import Recovered, cheapest
from lightning_hetero.checkpoint.from_files import Recovery
from lightning_hetero.checkpoint.inventory import (
    Inventory,
    Manifests,
    choose_run,
    complete_checkpoints,
    locations_of_files,
    take_inventory,
)
from lightning_hetero.checkpoint.manifest import (
    CheckpointId,
    FileEntry,
    PartManifest,
    name_of_unit,
)
from lightning_hetero.checkpoint.store import Store
from lightning_hetero.checkpoint.tiers import (
    REJECTED,
    Location,
    StoredFile,
    Tier,
    checkpoints_in,
    remove_checkpoints,
)
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.process import write_whole
from lightning_hetero.core.texts import format_table

_NODE = "here"


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
    before: Inventory | None = None
    while True:
        manifests: Manifests = {}
        inventory = take_inventory(tiers, node=_NODE, manifests=manifests)
        try:
            return _look_at(inventory, manifests, tiers, step)
        except CheckpointError:
            # A run that still writes may have deleted what was listed: list again.
            if inventory == before:
                raise
            before = inventory


def _look_at(
    inventory: Inventory, manifests: Manifests, tiers: Sequence[Tier], step: int | None
) -> View:
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
    sizes = [held.world_size for held in inventory.held if held.id == wanted[0]]
    size = complete.get(wanted[0], sizes[0])
    found = {
        part: manifest
        for (id_, world_size, part), manifest in manifests.items()
        if (id_, world_size) == (wanted[0], size)
    }
    return View(id=wanted[0], inventory=inventory, manifests=found)


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


def describe_layers(view: View) -> str:
    """Return a table of layers × places, with the share of a layer's bytes that each place has.

    The last column names the places from which a rank that reaches all of them would read it.
    """
    locations = locations_of_files(view.inventory, view.manifests)
    sizes: dict[int, dict[Location, int]] = defaultdict(lambda: defaultdict(int))
    totals: dict[int, int] = defaultdict(int)
    sources: dict[int, set[str]] = defaultdict(set)
    for (part, name), places in locations.items():
        entry = view.manifests[part].file(name)
        if entry.unit is None:
            continue
        totals[entry.unit] += entry.size_bytes
        for at in places:
            sizes[entry.unit][at] += entry.size_bytes
        sources[entry.unit].add(str(cheapest(places, _NODE, 0)) if places else "nowhere")
    columns = sorted({at for found in sizes.values() for at in found})
    num_layers = next(iter(view.manifests.values())).num_layers
    rows = [
        (
            name_of_unit(unit, num_layers),
            f"{total / 1e6:.2f}",
            *(f"{sizes[unit][at] / total:.0%}" for at in columns),
            ", ".join(sorted(sources[unit])),
        )
        for unit, total in sorted(totals.items())
    ]
    table = format_table(("layer", "MB", *map(str, columns), "read from"), rows)
    return f"{view.id}, saved by {view.world_size} ranks\n{table}"


def prune(tier: Tier) -> list[CheckpointId]:
    """Delete what is older than each run's newest `tier.keep` complete ones; return what it was.

    Args:
        tier: A place that holds all ranks' parts.
    """
    inventory, files = take_inventory([tier], node=_NODE), tier.store.list()
    complete: dict[str, list[CheckpointId]] = defaultdict(list)
    for item in complete_checkpoints(inventory):
        complete[item.run].append(item)
    gone = [
        item
        for item in checkpoints_in(files)
        if any(item < oldest for oldest in complete[item.run][tier.keep - 1 : tier.keep])
    ]
    remove_checkpoints(tier.store, files, gone)
    return gone


def reject(tiers: Sequence[Tier], step: int) -> list[str]:
    """Mark all checkpoints of a step, so that nobody recovers from them; return what was marked.

    Raises:
        CheckpointError: There is no checkpoint of that step.
    """
    found = [
        (tier, item)
        for tier in tiers
        for item in checkpoints_in(tier.store.list())
        if item.step == step
    ]
    if not found:
        places = ", ".join(str(tier.store) for tier in tiers)
        raise CheckpointError(f"There is no checkpoint of step {step} in {places}.")
    for tier, item in found:
        tier.store.write(f"{item.folder}/{REJECTED}", [b"rejected by a user\n"])
    return [f"{item} in {tier.store}" for tier, item in found]


def verify(view: View, tiers: Sequence[Tier]) -> list[str]:
    """Read every copy of a checkpoint; return one line for each file that is broken."""
    damage = [text for text in view.inventory.broken if view.id.folder in text]
    for held in view.inventory.held:
        if held.id != view.id:
            continue
        manifest = view.manifests[held.part]
        store = _tier_of(held.location, tiers).store
        damage += [f"{store}/{view.id.folder}/{name}: missing or cut" for name in held.missing]
        for entry in manifest.files:
            if entry.name not in held.missing:
                damage += _damage_of(store, manifest, entry)
    lost = sorted(set(range(view.world_size)) - set(view.manifests))
    if lost:
        damage.append(f"{view.id} has no valid manifest of parts {lost}")
    return damage


def _damage_of(store: Store, manifest: PartManifest, entry: FileEntry) -> list[str]:
    try:
        for _ in StoredFile(store, manifest, entry):
            pass
    except Exception as error:
        # Stores raise their client library's own types.
        unit = "metadata" if entry.unit is None else name_of_unit(entry.unit, manifest.num_layers)
        return [f"{store}/{manifest.id.folder}: {unit}: {error}"]
    return []


def _tier_of(location: Location, tiers: Sequence[Tier]) -> Tier:
    return next(tier for tier in tiers if tier.location(_NODE) == location)


def _whole_needs(manifests: Mapping[int, PartManifest]) -> list[SliceNeed]:
    """Return every parameter of a checkpoint, whole."""
    needs: dict[str, SliceNeed] = {}
    for manifest in manifests.values():
        for item in manifest.slices:
            rows = num_rows(item.shape, item.dim)
            need = SliceNeed(item.parameter, tuple(item.shape), item.dim, ((0, rows),))
            needs.setdefault(item.parameter, need)
    return [needs[name] for name in sorted(needs)]


def _consolidate(recovered: Recovered) -> dict[str, Any]:
    """Return a plain Lightning checkpoint of a state whose slices are whole parameters."""
    checkpoint: dict[str, Any] = dict(recovered.metadata)
    by_name = {item.parameter: item for item in recovered.slices}
    # Buffers and whatever else isn't sliced come with the metadata.
    checkpoint["state_dict"] = dict(checkpoint.get("state_dict", {})) | {
        name: item.weight for name, item in by_name.items()
    }
    optimizers = checkpoint.get("optimizer_states")
    if optimizers is not None:
        checkpoint["optimizer_states"] = [
            {**item, **optimizer_state_dict(item["param_groups"], by_name)} for item in optimizers
        ]
    checkpoint.setdefault("global_step", recovered.id.step)
    checkpoint.setdefault("epoch", 0)
    return checkpoint


def export_checkpoint(
    tiers: Sequence[Tier], path: str | Path, *, step: int | None = None
) -> Recovered:
    """Write one consolidated file, in one go or not at all.

    Args:
        tiers: Where the parts are.
        path: The file to write.
        step: Which step; the newest complete one if None.

    Raises:
        CheckpointError: There is no such checkpoint, or it can't be read, or the file not written.
    """
    view = look(tiers, step=step)
    # A run that still writes may have deleted this checkpoint by now; then a newer one is read,
    # which has the same parameters.
    recovery = Recovery(tiers, skip_unreadable=True)
    recovered = recovery.recover(_whole_needs(view.manifests), step=step)
    assert recovered is not None, "what was seen was complete"
    checkpoint = _consolidate(recovered)
    if "pytorch-lightning_version" not in checkpoint:
        raise CheckpointError(
            f"{recovered.id} has no 'pytorch-lightning_version' in its metadata, so "
            "Lightning can't read an export of it. It was saved without a Trainer."
        )

    def write(new: Path) -> None:
        with new.open("xb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())

    try:
        write_whole(Path(path), write)
    except OSError as error:
        raise CheckpointError(f"Can't write {path}: {error}") from error
    return recovered
