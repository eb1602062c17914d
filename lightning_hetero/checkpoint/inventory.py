"""Take the inventory of all tiers (the layer bitmap), and choose the checkpoint (AutoHet §IV-C).

Every rank reports which valid files of which checkpoints its node's tiers have (AutoHet's layer
bitmap); rank 0 also reports those of the remote tier. Only this module decides which checkpoints
are complete. Checksums are compared later, when files are read.

From all reports, each rank chooses the same run and checkpoint, or raises the same error. A run
never begins anew if a *lasting* place (a disk or a remote store, which outlives the machine's
memory) has a checkpoint, or can't be read and so might have one. A checkpoint only in shared memory
doesn't count, because it is lost with its node. If a run loses it before any lasting place has a
checkpoint, the run begins anew.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from pydantic import TypeAdapter

from lightning_hetero.checkpoint.claims import RUN_FILE, read_run
from lightning_hetero.checkpoint.deadlines import Operations, map_on_threads
from lightning_hetero.checkpoint.manifest import (
    CheckpointId,
    PartManifest,
    parse_manifest_name,
)
from lightning_hetero.checkpoint.tiers import (
    CONFIRMED,
    REJECTED,
    Location,
    Tier,
    TierKind,
    TornError,
    checkpoints_in,
    read_manifest,
)
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.process import Progress

_READERS = 16
_UNSEEN_ATTEMPTS = 1000
"""Added to the attempt number if a place can't be read. That place may have seen more starts of the
run than the others, but surely not this many more."""

Manifests = dict[tuple[CheckpointId, int, int], PartManifest]
"""Manifests by checkpoint, its number of parts, and part."""


@dataclass(frozen=True, slots=True)
class PartCopy:
    """One part in one place, with its valid manifest."""

    id: CheckpointId
    part: int
    world_size: int
    """Number of parts of the whole checkpoint."""
    missing: tuple[str, ...]
    """Files of the part that are missing or have a wrong size."""
    location: Location


@dataclass(frozen=True, slots=True)
class Inventory:
    """A report of what tiers have, without duplicates."""

    held: tuple[PartCopy, ...] = ()
    present: tuple[tuple[CheckpointId, Location], ...] = ()
    """Checkpoints of which any files exist, and where."""
    finished: tuple[tuple[CheckpointId, TierKind], ...] = ()
    """Checkpoints that were complete once, even if damaged since, and the kind of tier."""
    places: tuple[tuple[Location, str | None], ...] = ()
    """Places that answered, and the run that each belongs to."""
    broken: tuple[str, ...] = ()
    """Manifests whose content is wrong, and why."""
    unreadable: tuple[tuple[CheckpointId | None, str], ...] = ()
    """Places and manifests that couldn't be read, and why; their content may be good."""

    def encode(self) -> str:
        """Return it as JSON."""
        return _PARSER.dump_json(self).decode()

    @classmethod
    def decode(cls, text: str) -> "Inventory":
        """Parse what `encode` returns."""
        return _PARSER.validate_json(text)

    @classmethod
    def merge(cls, inventories: Iterable["Inventory"]) -> "Inventory":
        """Return one report of all ranks' reports: sorted, so that equal ones compare as equal."""
        items = list(inventories)
        names = [item.name for item in fields(cls)]
        found = {name: {entry for item in items for entry in getattr(item, name)} for name in names}
        return cls(**{name: tuple(sorted(entries, key=repr)) for name, entries in found.items()})


_PARSER = TypeAdapter(Inventory)


def take_inventory(
    tiers: Sequence[Tier],
    *,
    node: str,
    manifests: Manifests | None = None,
    progress: Progress | None = None,
    timeout_s: float = 300.0,
) -> Inventory:
    """Return what tiers have. They are read in parallel; those that can't be read are reported.

    Args:
        tiers: The node's own tiers and, on one rank, the remote one.
        node: Name of this node.
        manifests: Manifests that are read are added here.
        progress: Notified of each file that is read.
        timeout_s: Seconds after which a place without progress counts as unreadable.
    """
    found: Manifests = {} if manifests is None else manifests

    def look(tier: Tier) -> Inventory:
        def take(own: Progress) -> Inventory:
            own.part_of = progress
            return _take_one(tier, tier.location(node), found, own)

        try:
            return Operations(timeout_s).run(take)
        except Exception as error:
            # Stores raise their client library's own types.
            return Inventory(unreadable=((None, f"{tier}: {error}"),))

    return Inventory.merge(map_on_threads(look, tiers, count=len(tiers), progress=Progress()))


def _take_one(tier: Tier, location: Location, found: Manifests, progress: Progress) -> Inventory:
    files = tier.store.list()
    progress.tick()
    run = read_run(tier.store) if RUN_FILE in files else None
    present = checkpoints_in(files)
    rejected = {item for item in present if f"{item.folder}/{REJECTED}" in files}
    confirmed = {item for item in present if f"{item.folder}/{CONFIRMED}" in files}
    parts = [parsed for name in sorted(files) if (parsed := parse_manifest_name(name))]
    trusted = [item for item in parts if item[0] not in rejected]

    def read(item: tuple[CheckpointId, int]) -> PartManifest | Exception:
        try:
            return read_manifest(tier.store, *item)
        except Exception as error:
            # Stores raise their client library's own types.
            return error

    results = map_on_threads(read, trusted, count=min(_READERS, len(trusted)), progress=progress)
    held, broken, unreadable = [], [], []
    for (id_, part), result in zip(trusted, results, strict=True):
        if isinstance(result, PartManifest):
            sizes = {f.name: files.get(f"{id_.folder}/{f.name}") for f in result.files}
            missing = tuple(f.name for f in result.files if sizes[f.name] != f.size_bytes)
            held.append(PartCopy(id_, part, result.world_size, missing, location))
            found[id_, result.world_size, part] = result
            continue
        why = f"part {part} of {id_} in {tier}: {result}"
        if isinstance(result, TornError | FileNotFoundError):
            broken.append(why)
        else:
            unreadable.append((id_, why))
    broken += [
        f"{item} in {tier} was rejected; delete {item.folder}/{REJECTED} there to use it all the "
        "same"
        for item in sorted(rejected)
    ]
    return Inventory(
        held=tuple(held),
        present=tuple((item, location) for item in present),
        finished=tuple((item, tier.kind) for item in rejected | confirmed),
        places=((location, run),),
        broken=tuple(broken),
        unreadable=tuple(unreadable),
    )


def complete_checkpoints(inventory: Inventory) -> dict[CheckpointId, int]:
    """Return the complete checkpoints, newest first, each with its number of parts."""
    missing: dict[tuple[CheckpointId, int], dict[int, set[str]]] = defaultdict(dict)
    for copy in inventory.held:
        known = missing[copy.id, copy.world_size]
        known[copy.part] = known.get(copy.part, set(copy.missing)) & set(copy.missing)
    return {
        checkpoint: world_size
        for (checkpoint, world_size), parts in sorted(missing.items(), reverse=True)
        if set(parts) >= set(range(world_size)) and not any(parts.values())
    }


def locations_of_files(
    inventory: Inventory, manifests: Mapping[int, PartManifest]
) -> dict[tuple[int, str], tuple[Location, ...]]:
    """Return which tiers have each (part, file) of one checkpoint."""
    locations: dict[tuple[int, str], list[Location]] = {
        (part, entry.name): [] for part, manifest in manifests.items() for entry in manifest.files
    }
    for held in inventory.held:
        manifest = manifests.get(held.part)
        if manifest is None or (manifest.id, manifest.world_size) != (held.id, held.world_size):
            continue
        for entry in manifest.files:
            if entry.name not in held.missing:
                locations[held.part, entry.name].append(held.location)
    return {key: tuple(sorted(set(items))) for key, items in locations.items()}


class ChoiceError(CheckpointError):
    """No checkpoint can be used, but to begin anew might be wrong; all ranks raise it."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The run and the checkpoints to go on from."""

    run: str | None
    """Identity of the run; None if no place knows one."""
    checkpoints: Mapping[CheckpointId, int] = field(default_factory=dict)
    """The run's complete checkpoints, newest first, each with its number of parts."""
    attempt: int
    """Number of the next attempt, larger than all attempts of the run that were found, so that the
    next checkpoints count as newer and are never mixed with old ones; much larger if some place
    can't be read."""


def choose(
    inventory: Inventory, *, step: int | None = None, skip_unreadable: bool = False
) -> Choice:
    """Choose the run and the checkpoints to go on from.

    Args:
        inventory: What all ranks found.
        step: Choose this step only, of any run; None takes the newest.
        skip_unreadable: Whether to go on without places that can't be read.

    Raises:
        ChoiceError: A place that may hold something newer can't be read, there are checkpoints but
            no complete one, or it is unclear which run goes on.
    """
    unreadable = [] if skip_unreadable else inventory.unreadable
    _refuse_unreadable(why for checkpoint, why in unreadable if checkpoint is None)
    run = choose_run(inventory)
    complete = complete_checkpoints(inventory)
    own = {
        item: size
        for item, size in complete.items()
        if (item.run == run if step is None else item.step == step)
    }
    newest = next(iter(own), None)
    if step is not None and newest is None:
        steps = [item.step for item in complete]
        raise ChoiceError(
            f"There is no complete checkpoint of step {step}; complete are {steps or 'none'}."
        )
    if step is None:
        _refuse_unreadable(
            why
            for item, why in unreadable
            if item is not None and item.run == run and (newest is None or newest < item)
        )
        if newest is None:
            _refuse_to_begin_anew(inventory, run)
    is_blind = any(checkpoint is None for checkpoint, _ in inventory.unreadable)
    attempts = [item.attempt for item, _ in inventory.present if item.run == run]
    next_one = _UNSEEN_ATTEMPTS if is_blind else 1
    return Choice(run=run, checkpoints=own, attempt=next_one + max(attempts, default=-1))


def _refuse_unreadable(reasons: Iterable[str]) -> None:
    text = "; ".join(reasons)
    if text:
        raise ChoiceError(
            f"Can't read {text}; refusing to start from step 0 or from older checkpoints, since "
            "what can't be read may be the newest. Make it readable. To go on from the other "
            "places alone, give LayerwiseCheckpoint skip_unreadable=True."
        )


def choose_run(inventory: Inventory) -> str | None:
    """Return the run of the most lasting place that belongs to a run; None if none does."""
    runs: dict[TierKind, set[str]] = {}
    for kind in TierKind:
        marked = {run for at, run in inventory.places if at.kind is kind and run is not None}
        runs[kind] = marked or {item.run for item, at in inventory.present if at.kind is kind}
    if runs[TierKind.REMOTE]:
        return max(runs[TierKind.REMOTE])
    answered = {at.kind for at, _ in inventory.places}
    on_disk = sorted({(item.run, at) for item, at in inventory.present if at.kind is TierKind.DISK})
    if TierKind.REMOTE in answered and on_disk:
        run, place = on_disk[-1]
        raise ChoiceError(
            f"{place} holds checkpoints of the run {run!r}, but the place that all nodes share is "
            "empty, so it is unclear what to do. To start anew, delete the checkpoints on all "
            f"nodes' disks, too. To go on from them, copy a disk's {RUN_FILE} to the shared place."
        )
    if runs[TierKind.DISK]:
        return max(runs[TierKind.DISK])
    # A run that only shared memory knows doesn't count: to start anew, users delete the lasting
    # places.
    return None if answered - {TierKind.MEMORY} else max(runs[TierKind.MEMORY], default=None)


def _refuse_to_begin_anew(inventory: Inventory, run: str | None) -> None:
    """Raise if any lasting checkpoint was ever complete."""
    if inventory.unreadable:
        reasons = "; ".join(why for _, why in inventory.unreadable)
        raise ChoiceError(f"Nothing to go on from is left without what can't be read: {reasons}.")
    has_lasting_place = any(at.kind is not TierKind.MEMORY for at, _ in inventory.places)
    lost = {
        item
        for item, kind in inventory.finished
        if item.run == run and (kind != TierKind.MEMORY or not has_lasting_place)
    }
    if lost:
        steps = ", ".join(map(str, sorted(lost)))
        broken = "".join(f" {text.rstrip('.')}." for text in inventory.broken)
        raise ChoiceError(
            f"There are checkpoints ({steps}), but none is complete: parts are missing or damaged."
            f"{broken} Bring back the nodes or files that had them, or delete the folders to start "
            "anew."
        )
