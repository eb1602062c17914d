"""Take the inventory of all tiers (the layer bitmap), and choose the checkpoint (AutoHet §IV-C).

Every rank reports which valid files of which checkpoints its node's tiers hold, rank 0 also those
of the remote one. `tiers` decides what is complete; files' checksums are compared when they are
read.

From the inventory of all ranks, each chooses the same run and checkpoint, or raises the same error.
A run never begins anew if there is, or might be, a lasting checkpoint to go on from. Shared memory
doesn't count: a node that is gone doesn't bring it back. So a run that loses its first checkpoint
before any lasting place has one begins anew, just as a later loss would take it back to the newest
lasting one.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from lightning_hetero.checkpoint.format.manifest import CheckpointId, PartManifest
from lightning_hetero.checkpoint.peers.deadlines import Operations, map_on_threads
from lightning_hetero.checkpoint.places.claims import RUN_FILE, read_run
from lightning_hetero.checkpoint.places.tiers import (
    CONFIRMED,
    REJECTED,
    Location,
    PartCopy,
    Tier,
    TierKind,
    checkpoints_in,
    complete_size,
    look_at_parts,
)
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.process import Progress

__all__ = [
    "Choice",
    "ChoiceError",
    "Inventory",
    "choose",
    "choose_run",
    "complete_checkpoints",
    "locations_of_files",
    "take_inventory",
]


@dataclass(frozen=True, slots=True)
class Inventory:
    """One rank's report of what tiers hold, without duplicates."""

    held: tuple[PartCopy, ...] = ()
    present: tuple[tuple[CheckpointId, Location], ...] = ()
    """Checkpoints with any files, complete or not, and where."""
    finished: tuple[tuple[CheckpointId, TierKind], ...] = ()
    """Checkpoints that were once complete, even if damaged since, and the kind of tier."""
    places: tuple[tuple[Location, str | None], ...] = ()
    """Places that answered, and the run that each belongs to."""
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
        """Return all ranks' reports as one, without duplicates, and sorted so that it compares."""
        items = list(inventories)

        def all_of(name: str) -> tuple[Any, ...]:
            found = {entry for item in items for entry in getattr(item, name)}
            return tuple(sorted(found, key=repr))

        return cls(**{field.name: all_of(field.name) for field in fields(cls)})


def _to_json(item: CheckpointId | Location | PartCopy) -> dict[str, Any]:
    if isinstance(item, CheckpointId):
        return {"id": item.folder}
    return {type(item).__name__: [getattr(item, name) for name in item.__slots__]}


def _from_json(data: dict[str, Any]) -> Any:
    ((kind, body),) = data.items()
    if kind == "id":
        return CheckpointId.parse(body)
    if kind == "Location":
        return Location(body[0], TierKind(body[1]))
    return PartCopy(*map(_as_tuple, body))


def _as_tuple(item: Any) -> Any:
    return tuple(item) if isinstance(item, list) else item


def take_inventory(
    tiers: Sequence[Tier],
    *,
    node: str,
    progress: Progress | None = None,
    timeout_s: float = 300.0,
) -> Inventory:
    """Return what tiers hold, searched in parallel; what can't be read, or hangs, is reported.

    Args:
        tiers: The node's own tiers and, on one rank, the remote one.
        node: Name of this node.
        progress: Ticks with everything that is read.
        timeout_s: How long a place may make no progress.
    """

    def look(tier: Tier) -> Inventory:
        def take(own: Progress) -> Inventory:
            own.part_of = progress
            return _take_one(tier, tier.location(node), own)

        try:
            return Operations(timeout_s).run(take)
        except Exception as error:
            # Stores raise their client library's own types.
            return Inventory(unreadable=((None, f"{tier}: {error}"),))

    return Inventory.merge(map_on_threads(look, tiers, count=len(tiers), progress=Progress()))


def _take_one(tier: Tier, location: Location, progress: Progress) -> Inventory:
    files = tier.store.list()
    progress.tick()
    run = read_run(tier.store) if RUN_FILE in files else None
    present = checkpoints_in(files)
    found = look_at_parts(tier.store, files, present, progress)
    marks = (CONFIRMED, REJECTED)
    finished = {item for item in present if any(f"{item.folder}/{mark}" in files for mark in marks)}
    # Files are written before their manifest, each whole or not at all: this was done by no crash.
    finished |= {copy.id for copy in found.copies if copy.missing} | {
        id_ for id_, _ in found.broken
    }
    return Inventory(
        held=tuple(replace(copy, location=location) for copy in found.copies),
        present=tuple((item, location) for item in present),
        finished=tuple((item, tier.kind) for item in finished),
        places=((location, run),),
        broken=(
            *(why for _, why in found.broken),
            *(
                f"{item} in {tier} was rejected; delete {item.folder}/{REJECTED} there to use it "
                "all the same"
                for item in present
                if f"{item.folder}/{REJECTED}" in files
            ),
        ),
        unreadable=found.unreadable,
    )


def complete_checkpoints(inventory: Inventory) -> dict[CheckpointId, int]:
    """Return the complete checkpoints, newest first, each with its number of parts."""
    copies: dict[CheckpointId, list[PartCopy]] = defaultdict(list)
    for held in inventory.held:
        copies[held.id].append(held)
    sizes = {checkpoint: complete_size(copies[checkpoint]) for checkpoint in copies}
    return {item: size for item, size in sorted(sizes.items(), reverse=True) if size is not None}


def locations_of_files(
    inventory: Inventory, manifests: Mapping[int, PartManifest]
) -> dict[tuple[int, str], tuple[Location, ...]]:
    """Return which tiers hold each (part, file) of one checkpoint."""
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


_UNSEEN_ATTEMPTS = 1000
"""More starts than an unreadable place may know of that the others don't."""


class ChoiceError(CheckpointError):
    """There is nothing to go on from, and beginning anew may be wrong; the same on all ranks."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The run and the checkpoints to go on from."""

    run: str | None
    """Identity of the run; None if no place knows one."""
    checkpoints: Mapping[CheckpointId, int]
    """Its complete checkpoints, newest first, each with its number of parts."""
    attempt: int
    """Attempt number of the next saves: above all attempts found of the run, complete or not, and
    far above if some place can't be read. So new parts are newer, and never mix with old ones."""
    ignored: tuple[str, ...]
    """Checkpoints that aren't used: other runs', and remains in shared memory."""


def choose(
    inventory: Inventory, *, step: int | None = None, skip_unreadable: bool = False
) -> Choice:
    """Choose the run and the checkpoints to go on from.

    Args:
        inventory: What all ranks found.
        step: Take only this step, of any run.
        skip_unreadable: Go on without places that can't be read.

    Raises:
        ChoiceError: A place that might hold something newer can't be read, there were
            checkpoints and none is complete, or it is unclear which run goes on.
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
    if step is not None and not own:
        steps = [item.step for item in complete]
        raise ChoiceError(
            f"There is no complete checkpoint of step {step}; complete are {steps or 'none'}."
        )
    present = [item for item, _ in inventory.present if item.run == run]
    newest = next(iter(own), None)
    if step is None:
        _refuse_unreadable(
            why
            for item, why in unreadable
            if item is not None and item.run == run and (newest is None or newest < item)
        )
        if newest is None:
            _refuse_to_begin_anew(inventory, run)
    is_blind = any(checkpoint is None for checkpoint, _ in inventory.unreadable)
    next_one = _UNSEEN_ATTEMPTS if is_blind else 1
    return Choice(
        run=run,
        checkpoints=own,
        attempt=next_one + max((item.attempt for item in present), default=-1),
        ignored=tuple(
            sorted(
                {
                    f"{item} of run {item.run} in {at}"
                    for item, at in inventory.present
                    if item.run != run
                }
                | {
                    f"{item} in {at}: parts are gone or were never written, nothing older is there"
                    for item, at in inventory.present
                    if newest is None and item.run == run
                }
            )
        ),
    )


def _refuse_unreadable(reasons: Iterable[str]) -> None:
    text = "; ".join(reasons)
    if text:
        raise ChoiceError(
            f"Can't read {text}; refusing to start from step 0 or from older checkpoints, since "
            "what can't be read may be the newest. Make it readable. To go on from the other "
            "places alone, give LayerwiseCheckpoint skip_unreadable=True."
        )


def choose_run(inventory: Inventory) -> str | None:
    """Return the run of the most lasting place that belongs to one; None if no place does."""
    runs: dict[TierKind, set[str]] = {kind: set() for kind in TierKind}
    for kind in TierKind:
        marked = {run for at, run in inventory.places if at.kind is kind and run is not None}
        runs[kind] = marked or {item.run for item, at in inventory.present if at.kind is kind}
    if runs[TierKind.REMOTE]:
        return max(runs[TierKind.REMOTE])
    answered = {at.kind for at, _ in inventory.places}
    on_disk = sorted({(item.run, at) for item, at in inventory.present if at.kind is TierKind.DISK})
    if TierKind.REMOTE in answered and on_disk:
        _refuse_two_opinions(*on_disk[-1])
    if runs[TierKind.DISK]:
        return max(runs[TierKind.DISK])
    # Not memory's run alone: the lasting places may have been deleted to start anew.
    return None if answered - {TierKind.MEMORY} else max(runs[TierKind.MEMORY], default=None)


def _refuse_two_opinions(run: str, place: Location) -> None:
    raise ChoiceError(
        f"{place} holds checkpoints of the run {run!r}, but the place that all nodes share is "
        "empty, so it is unclear what to do. To start anew, delete the checkpoints on all nodes' "
        f"disks, too. To go on from them, copy a disk's {RUN_FILE} to the shared place, or write "
        f'{{"run": "{run}"}} into a file of that name there.'
    )


def _refuse_to_begin_anew(inventory: Inventory, run: str | None) -> None:
    """Raise if a lasting checkpoint was ever complete; unfinished first saves don't count."""
    if inventory.unreadable:
        reasons = "; ".join(why for _, why in inventory.unreadable)
        raise ChoiceError(f"Nothing to go on from is left without what can't be read: {reasons}.")
    has_lasting_place = any(at.kind is not TierKind.MEMORY for at, _ in inventory.places)
    lost = sorted(
        {
            item
            for item, kind in inventory.finished
            if item.run == run and (kind != TierKind.MEMORY or not has_lasting_place)
        }
    )
    if lost:
        steps = ", ".join(str(item) for item in lost)
        broken = "".join(f" {text.rstrip('.')}." for text in inventory.broken)
        raise ChoiceError(
            f"There are checkpoints ({steps}), but none is complete: parts are missing or damaged."
            f"{broken} Bring back the nodes or files that had them, or delete the folders to start "
            "anew."
        )
