"""How the ranks of a run get their state back, together.

1. Every rank reports what its node's tiers hold; the run's newest complete checkpoint is chosen
   (`choice`).
2. Its manifests are shared; every rank says which byte ranges it needs.
3. All ranks compute the same table of fetches and carry it out: own memory, own disk and the remote
   store by threads, peers by sends and receives in the table's order. Every block's checksum is
   compared before it counts.
4. What failed is shared; the sources that failed are struck off and step 3 is repeated with what is
   missing. Where no source is left, the next older complete checkpoint is tried.

Floor: each needed byte is read once, at the bandwidth of its source, the sources side by side.
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from lightning_hetero.checkpoint.claims import mark_places, new_run
from lightning_hetero.checkpoint.content import Recovered, RecoveryReport, SliceNeed
from lightning_hetero.checkpoint.manifest import CheckpointId, PartManifest, manifest_name
from lightning_hetero.checkpoint.recovering.assembly import Assembly, RankNeeds
from lightning_hetero.checkpoint.recovering.choice import Choice, ChoiceError, choose
from lightning_hetero.checkpoint.recovering.fetching import Failure, Fetcher
from lightning_hetero.checkpoint.recovering.inventory import (
    Holder,
    Inventory,
    complete_checkpoints,
    holders_of_files,
    take_inventory,
)
from lightning_hetero.checkpoint.recovering.sources import FileRange, plan_fetches
from lightning_hetero.checkpoint.tiers import Tier, TierKind
from lightning_hetero.checkpoint.transport import SoloTransport, Transport, finish_together
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.plan import ParallelPlan

__all__ = ["begin_run", "recover"]

_log = logging.getLogger(__name__)
_LOOKS = 20
"""Times to look again where a run that still writes deletes what was seen."""


@dataclass
class _Session:
    """What stays the same while the ranks try checkpoint after checkpoint."""

    tiers: Sequence[Tier]
    transport: Transport
    node_of_rank: list[str]
    inventory: Inventory = field(default_factory=Inventory)
    seconds: dict[str, float] = field(default_factory=dict)

    def tier_of(self, holder: Holder) -> Tier | None:
        """Return the tier behind a holder that this rank reaches."""
        own = self.node_of_rank[self.transport.global_rank]
        for tier in self.tiers:
            node = tier.name if tier.kind is TierKind.REMOTE else own
            if (node, tier.kind) == (holder.node, holder.kind):
                return tier
        return None


def recover(
    needs: Sequence[SliceNeed],
    tiers: Sequence[Tier],
    *,
    node: str = "node",
    transport: Transport | None = None,
    step: int | None = None,
    skip_unreadable: bool = False,
) -> Recovered | None:
    """Restore the run's newest complete checkpoint; every rank calls it. Communicates.

    Args:
        needs: What this rank owns from now on.
        tiers: This node's tiers and the remote one.
        node: Name of this rank's node; equal on ranks that share the local tiers.
        transport: The other ranks; None if there are none.
        step: Take this step, of whichever run, and no other.
        skip_unreadable: Go on without tiers that can't be read.

    Returns:
        The state, or None if there is nothing but, at most, unfinished first saves.

    Raises:
        CheckpointError: There are checkpoints but none can be read, a tier can't be read, or `step`
            doesn't exist; all ranks raise it.
        PeerError: Another rank is gone.
    """
    session = _open_session(tiers, node, transport or SoloTransport())
    for _ in range(_LOOKS):
        found: Recovered | None = None
        failure: CheckpointError | None = None
        try:
            choice = choose(session.inventory, step=step, skip_unreadable=skip_unreadable)
            found = _recover_newest(session, choice, needs)
        except _ExhaustedError as error:
            failure = error
        except ChoiceError as error:
            failure = CheckpointError(f"{error} Looked in {_places(session)}.")
        if found is not None:
            return found
        # What was seen may be gone because a run that still writes has pruned it meanwhile.
        if not _look(session):
            break
    if failure is not None:
        raise failure
    return None


def _recover_newest(
    session: _Session, choice: Choice, needs: Sequence[SliceNeed]
) -> Recovered | None:
    for text in (*session.inventory.broken, *choice.ignored):
        if session.transport.global_rank == 0:
            _log.warning("Not counted as a checkpoint: %s", text)
    skipped: list[str] = []
    for checkpoint in choice.checkpoints:
        try:
            return _recover_from(session, choice, checkpoint, needs, skipped)
        except _ExhaustedError as error:
            _log.warning("%s can't be used: %s", checkpoint, error)
            skipped.append(f"{checkpoint}: {error}")
    if skipped:
        raise _ExhaustedError(" ".join(skipped))
    return None


def begin_run(
    tiers: Sequence[Tier],
    *,
    recovered: Recovered | None = None,
    node: str = "node",
    transport: Transport | None = None,
    skip_unreadable: bool = False,
) -> CheckpointId:
    """Return the run's identity, and an attempt number for what this start of it saves.

    Every rank calls it, after `recover`, with what that returned. Communicates. The identity is the
    one that the lasting places know, else a new one, and is written down in all of them now. Parts
    that another start, or another run, has left are never taken for this one's.

    Returns:
        Step 0 of the attempt.

    Raises:
        CheckpointError: As `recover`, or a lasting place can't be written; all ranks raise it.
    """
    session = _open_session(tiers, node, transport or SoloTransport(), look=recovered is None)
    if recovered is None:
        choice = choose(session.inventory, skip_unreadable=skip_unreadable)
        proposals = session.transport.all_gather(new_run().encode())
        run = proposals[0].decode() if choice.run is None else choice.run
        attempt = choice.attempt
    else:
        run, attempt = recovered.id.run, recovered.report.attempt
    places = _to_look_after(session)
    _, marks = finish_together(lambda: mark_places(places, run), session.transport, lambda _: {})
    errors = [mark["error"] for mark in marks if "error" in mark]
    if errors and not skip_unreadable:
        raise CheckpointError(" ".join(errors))
    return CheckpointId(0, attempt, run)


class _ExhaustedError(CheckpointError):
    """No source is left for something; all ranks raise it at the same point."""


def _open_session(
    tiers: Sequence[Tier], node: str, transport: Transport, *, look: bool = True
) -> _Session:
    names = [name.decode() for name in transport.all_gather(node.encode())]
    session = _Session(tiers, transport, names)
    if look:
        _look(session)
    return session


def _look(session: _Session) -> bool:
    """Take an inventory together; return whether it is another one than before."""
    start_s, before = time.perf_counter(), session.inventory
    node = session.node_of_rank[session.transport.global_rank]
    tiers = _to_look_after(session)
    _, reports = finish_together(
        lambda: take_inventory(tiers, node=node),
        session.transport,
        lambda report: {"report": report.encode().decode()},
    )
    if errors := [report["error"] for report in reports if "error" in report]:
        raise CheckpointError(f"Can't look for checkpoints: {' '.join(errors)}")
    session.inventory = Inventory.merge(
        Inventory.decode(report["report"].encode()) for report in reports
    )
    session.seconds["inventory"] = time.perf_counter() - start_s
    return session.inventory != before


def _to_look_after(session: _Session) -> list[Tier]:
    """Return the tiers that this rank looks after for all that share them."""
    rank = session.transport.global_rank
    is_first = session.node_of_rank.index(session.node_of_rank[rank]) == rank
    return [t for t in session.tiers if (rank == 0 if t.kind is TierKind.REMOTE else is_first)]


def _recover_from(
    session: _Session,
    choice: Choice,
    checkpoint: CheckpointId,
    needs: Sequence[SliceNeed],
    skipped: list[str],
) -> Recovered:
    start_s, world_size = time.perf_counter(), choice.checkpoints[checkpoint]
    manifests = _share_manifests(session, checkpoint, world_size)
    assembly, ranges = _share_needs(session, manifests, needs)
    session.seconds["manifests"] = time.perf_counter() - start_s
    start_s = time.perf_counter()
    fetcher, failures = _fetch_all(session, checkpoint, manifests, assembly, ranges)
    session.seconds["fetch"] = time.perf_counter() - start_s
    first = manifests[0]
    slices, metadata, rank_metadata = assembly.finish()
    kind = min(held.holder.kind for held in session.inventory.held if held.id == checkpoint)
    return Recovered(
        id=checkpoint,
        world_size=world_size,
        plan=None if first.plan is None else ParallelPlan.from_dict(first.plan),
        slices=slices,
        metadata=metadata,
        rank_metadata=rank_metadata,
        report=RecoveryReport(
            id=checkpoint,
            bytes_by_source=dict(fetcher.bytes_by_source),
            seconds=dict(session.seconds),
            failures=tuple(failures),
            skipped=tuple(skipped),
            attempt=choice.attempt,
            place=kind.name.lower(),
            is_last=_is_last(session.inventory, checkpoint, kind),
        ),
    )


def _is_last(inventory: Inventory, checkpoint: CheckpointId, kind: TierKind) -> bool:
    """Return whether a run has nothing to go on from without a checkpoint's copy in some tiers."""
    others = tuple(
        held
        for held in inventory.held
        if held.id.run == checkpoint.run and (held.id, held.holder.kind) != (checkpoint, kind)
    )
    return not complete_checkpoints(Inventory(held=others))


def _share_manifests(
    session: _Session, checkpoint: CheckpointId, world_size: int
) -> dict[int, PartManifest]:
    """Let the lowest rank that reaches a part's manifest read it for all."""
    mine: list[str] = []
    rank = session.transport.global_rank
    for part, holders in sorted(_holders_of_parts(session, checkpoint, world_size).items()):
        if _reader_of_manifest(session, part, holders) == rank:
            text = _read_any(session, checkpoint, part, holders)
            if text is not None:
                mine.append(text)
    manifests: dict[int, PartManifest] = {}
    for data in session.transport.all_gather(json.dumps(mine).encode()):
        for text in json.loads(data):
            manifest = PartManifest.decode(text.encode())
            if (manifest.id, manifest.world_size) == (checkpoint, world_size):
                manifests[manifest.part] = manifest
    lost = sorted(set(range(world_size)) - set(manifests))
    if lost:
        raise _ExhaustedError(
            f"The manifests of parts {lost} became unreadable. Looked in {_places(session)}."
        )
    return manifests


def _holders_of_parts(
    session: _Session, checkpoint: CheckpointId, world_size: int
) -> dict[int, list[Holder]]:
    holders: dict[int, list[Holder]] = {}
    for held in session.inventory.held:
        if (held.id, held.world_size) == (checkpoint, world_size):
            holders.setdefault(held.part, []).append(held.holder)
    return {part: sorted(items, key=lambda h: (h.kind, h.node)) for part, items in holders.items()}


def _reader_of_manifest(session: _Session, part: int, holders: Sequence[Holder]) -> int:
    if holders[0].kind is TierKind.REMOTE:
        return part % session.transport.world_size
    return session.node_of_rank.index(holders[0].node)


def _read_any(
    session: _Session, checkpoint: CheckpointId, part: int, holders: Sequence[Holder]
) -> str | None:
    for holder in holders:
        tier = session.tier_of(holder)
        if tier is not None:
            try:
                data = tier.store.read(manifest_name(checkpoint, part))
                PartManifest.decode(data)
                return data.decode()
            except Exception as error:
                # Stores raise their client library's own types; the next holder may do.
                _log.warning("Manifest of part %d of %s: %s", part, checkpoint, error)
    return None


def _share_needs(
    session: _Session, manifests: Mapping[int, PartManifest], needs: Sequence[SliceNeed]
) -> tuple[Assembly, dict[int, list[FileRange]]]:
    """Return what puts this rank's state together, and the byte ranges that every rank needs."""
    transport = session.transport
    message: dict[str, Any]
    assembly = None
    try:
        own = RankNeeds(needs, manifests, transport.global_rank, transport.world_size)
        assembly = Assembly(own)
        message = {"ranges": [[r.part, r.file, r.start, r.stop] for r in own.blocks()]}
    except CheckpointError as error:
        message = {"error": str(error)}
    ranges: dict[int, list[FileRange]] = {}
    for rank, data in enumerate(transport.all_gather(json.dumps(message).encode())):
        answer = json.loads(data)
        if "error" in answer:
            raise CheckpointError(f"Rank {rank}: {answer['error']}")
        ranges[rank] = [FileRange(*item) for item in answer["ranges"]]
    assert assembly is not None
    return assembly, ranges


def _fetch_all(
    session: _Session,
    checkpoint: CheckpointId,
    manifests: Mapping[int, PartManifest],
    assembly: Assembly,
    ranges: Mapping[int, Sequence[FileRange]],
) -> tuple[Fetcher, list[str]]:
    """Fetch, strike off the sources that fail, fetch the rest, until nothing is missing."""
    holders = {
        key: list(items) for key, items in holders_of_files(session.inventory, manifests).items()
    }
    fetcher = Fetcher(session.transport, session.tier_of, manifests, assembly.deliver)
    reasons: list[str] = []
    while any(ranges.values()):
        try:
            fetches = plan_fetches(ranges, manifests, holders, session.node_of_rank)
        except CheckpointError as error:
            tried = f" Tried: {'; '.join(reasons)}." if reasons else ""
            raise _ExhaustedError(f"{error} Looked in {_places(session)}.{tried}") from error
        failures = fetcher.run(fetches)
        ranges = _share_failures(session, checkpoint, failures, holders, reasons)
    return fetcher, reasons


def _share_failures(
    session: _Session,
    checkpoint: CheckpointId,
    failures: Sequence[Failure],
    holders: dict[tuple[int, str], list[Holder]],
    reasons: list[str],
) -> dict[int, list[FileRange]]:
    """Strike off the sources that failed anywhere; return what is still missing."""
    message = [[*astuple(f.range), *astuple(f.holder), f.why] for f in failures]
    missing: dict[int, list[FileRange]] = {}
    for rank, data in enumerate(session.transport.all_gather(json.dumps(message).encode())):
        missing[rank] = []
        for part, file, start, stop, node, kind, why in json.loads(data):
            missing[rank].append(FileRange(part, file, start, stop))
            holder = Holder(node, TierKind(kind))
            if holder in holders[part, file]:
                holders[part, file].remove(holder)
                reasons.append(f"{holder}: {file}: {why}")
                _log.warning("%s of %s in %s: %s", file, checkpoint, holder, why)
    return missing


def _places(session: _Session) -> str:
    found = sorted({held.holder for held in session.inventory.held})
    own = [str(tier) for tier in session.tiers]
    return ", ".join([*map(str, found), *own])
