"""Recover the state of a run's ranks, all together.

1. Every rank reports what its node's tiers hold; the run's newest complete checkpoint is chosen
   (`inventory`).
2. Its manifests are shared; every rank says which byte ranges it needs.
3. All ranks compute the same table of fetches and carry it out: own memory, own disk and the remote
   store by threads, peers by sends and receives in the table's order. Every block's checksum is
   compared before it counts.
4. All ranks learn of failures; sources that failed are no longer used, and step 3 is repeated for
   what is missing. If no source is left, the next older complete checkpoint is tried.

Floor: each needed byte is read once, at the bandwidth of its source, the sources side by side.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from lightning_hetero.checkpoint.claims import mark_places, new_run
from lightning_hetero.checkpoint.content import Recovered, RecoveryReport, SliceNeed
from lightning_hetero.checkpoint.manifest import CheckpointId, PartManifest
from lightning_hetero.checkpoint.recovering.assembly import Assembly, RankNeeds
from lightning_hetero.checkpoint.recovering.fetching import (
    Failure,
    Fetcher,
    FileRange,
    assign_sources,
)
from lightning_hetero.checkpoint.recovering.inventory import (
    Choice,
    ChoiceError,
    choose,
    holders_of_files,
)
from lightning_hetero.checkpoint.recovering.session import ExhaustedError, Session
from lightning_hetero.checkpoint.tiers import Holder, Tier, TierKind
from lightning_hetero.checkpoint.transport import Transport, finish_together, gather_json
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.plan import ParallelPlan

__all__ = ["begin_run", "recover"]

_log = logging.getLogger(__name__)
_LOOKS = 20
"""Times to look again, if a run that still writes has deleted what was seen."""


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
        needs: The slices that this rank keeps from now on.
        tiers: This node's tiers and the remote one.
        node: Name of this rank's node; equal on ranks that share the local tiers.
        transport: Connects the ranks; None for a single rank.
        step: Take only this step, of any run.
        skip_unreadable: Go on without tiers that can't be read.

    Returns:
        The state; None if there is none, except perhaps unfinished first saves.

    Raises:
        CheckpointError: There are checkpoints but none can be read, a tier can't be read, or `step`
            doesn't exist; all ranks raise it.
        PeerError: Another rank is gone.
    """
    session = Session.open(tiers, node, transport)
    session.look()
    for _ in range(_LOOKS):
        found: Recovered | None = None
        failure: CheckpointError | None = None
        try:
            choice = choose(session.inventory, step=step, skip_unreadable=skip_unreadable)
            found = _recover_newest(session, choice, needs)
        except ExhaustedError as error:
            failure = error
        except ChoiceError as error:
            failure = CheckpointError(f"{error} Looked in {session.places}.")
        if found is not None:
            return found
        # A run that still writes may have pruned what was seen.
        if not session.look():
            break
    if failure is not None:
        raise failure
    return None


def _recover_newest(
    session: Session, choice: Choice, needs: Sequence[SliceNeed]
) -> Recovered | None:
    for text in (*session.inventory.broken, *choice.ignored):
        if session.transport.global_rank == 0:
            _log.warning("Not counted as a checkpoint: %s", text)
    skipped: list[str] = []
    for checkpoint in choice.checkpoints:
        try:
            return _recover_from(session, choice, checkpoint, needs, skipped)
        except ExhaustedError as error:
            _log.warning("%s can't be used: %s", checkpoint, error)
            skipped.append(f"{checkpoint}: {error}")
    if skipped:
        raise ExhaustedError(" ".join(skipped))
    return None


def begin_run(
    tiers: Sequence[Tier],
    *,
    recovered: Recovered | None = None,
    node: str = "node",
    transport: Transport | None = None,
    skip_unreadable: bool = False,
    anew: bool = False,
) -> CheckpointId:
    """Return the run's identity and the attempt number of this start's checkpoints, as an id.

    Every rank calls it, after `recover`, with what that returned. Communicates. The identity is the
    one that the lasting places know, else a new one, and is now written into all of them. So parts
    left by another start, or another run, are never taken for this start's.

    Args:
        tiers: This node's tiers and the remote one.
        recovered: What `recover` returned.
        node: Name of this rank's node.
        transport: Connects the ranks; None for a single rank.
        skip_unreadable: Go on without tiers that can't be read.
        anew: Whether a new run begins, whatever is in the places.

    Returns:
        Step 0 of the attempt.

    Raises:
        CheckpointError: As `recover`, or a lasting place can't be written; all ranks raise it.
    """
    session = Session.open(tiers, node, transport)
    if anew:
        run, attempt = session.transport.all_gather(new_run().encode())[0].decode(), 0
    elif recovered is None:
        session.look()
        choice = choose(session.inventory, skip_unreadable=skip_unreadable)
        proposals = session.transport.all_gather(new_run().encode())
        run = proposals[0].decode() if choice.run is None else choice.run
        attempt = choice.attempt
    else:
        run, attempt = recovered.id.run, recovered.report.attempt
    own = session.looked_after
    finish_together(lambda _: mark_places(own, run), session.transport, may_fail=skip_unreadable)
    return CheckpointId(0, attempt, run)


def _recover_from(
    session: Session,
    choice: Choice,
    checkpoint: CheckpointId,
    needs: Sequence[SliceNeed],
    skipped: list[str],
) -> Recovered:
    start_s, world_size = time.perf_counter(), choice.checkpoints[checkpoint]
    manifests = session.share_manifests(checkpoint, world_size)
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
        ),
    )


def _share_needs(
    session: Session, manifests: Mapping[int, PartManifest], needs: Sequence[SliceNeed]
) -> tuple[Assembly, dict[int, list[FileRange]]]:
    """Return the assembly of this rank's state, and the byte ranges that each rank needs."""
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
    for rank, answer in enumerate(gather_json(transport, message)):
        if "error" in answer:
            raise CheckpointError(f"Rank {rank}: {answer['error']}")
        ranges[rank] = [FileRange(*item) for item in answer["ranges"]]
    assert assembly is not None
    return assembly, ranges


def _fetch_all(
    session: Session,
    checkpoint: CheckpointId,
    manifests: Mapping[int, PartManifest],
    assembly: Assembly,
    ranges: Mapping[int, Sequence[FileRange]],
) -> tuple[Fetcher, list[str]]:
    """Fetch everything, again from other sources where one fails, until nothing is missing."""
    holders = {
        key: list(items) for key, items in holders_of_files(session.inventory, manifests).items()
    }
    fetcher = Fetcher(session.transport, session.tier_of, manifests, assembly.deliver)
    reasons: list[str] = []
    while any(ranges.values()):
        try:
            fetches = assign_sources(ranges, manifests, holders, session.node_of_rank)
        except CheckpointError as error:
            tried = f" Tried: {'; '.join(reasons)}." if reasons else ""
            raise ExhaustedError(f"{error} Looked in {session.places}.{tried}") from error
        failures = fetcher.run(fetches)
        ranges = _share_failures(session, checkpoint, failures, holders, reasons)
    return fetcher, reasons


def _share_failures(
    session: Session,
    checkpoint: CheckpointId,
    failures: Sequence[Failure],
    holders: dict[tuple[int, str], list[Holder]],
    reasons: list[str],
) -> dict[int, list[FileRange]]:
    """Remove the holders that failed on any rank; return what is still missing, by rank."""
    message = [[*astuple(f.range), *astuple(f.holder), f.why] for f in failures]
    missing: dict[int, list[FileRange]] = {}
    for rank, failed in enumerate(gather_json(session.transport, message)):
        missing[rank] = []
        for part, file, start, stop, node, kind, why in failed:
            missing[rank].append(FileRange(part, file, start, stop))
            holder = Holder(node, TierKind(kind))
            if holder in holders[part, file]:
                holders[part, file].remove(holder)
                reasons.append(f"{holder}: {file}: {why}")
                _log.warning("%s of %s in %s: %s", file, checkpoint, holder, why)
    return missing
