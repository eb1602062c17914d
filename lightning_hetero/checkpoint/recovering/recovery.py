"""Recover the state of a run's ranks from files, all together.

1. Every rank reports what its node's tiers hold; the run's newest complete checkpoint is chosen
   (`inventory`).
2. Its manifests are shared, each read by one rank for all.
3. Every rank gets the bytes that it needs, each from its cheapest source (`fetching`): own tiers
   and the remote store directly, peers' tiers by HTTP.
4. All say whether they have everything. If not, all try the next older complete checkpoint.

Storage is waited for while it makes progress, and given up if it hangs.
"""

import logging
import time
from collections.abc import Sequence

from lightning_hetero.checkpoint.claims import mark_places, new_run
from lightning_hetero.checkpoint.content import Recovered, SliceNeed
from lightning_hetero.checkpoint.manifest import CheckpointId
from lightning_hetero.checkpoint.peers import Peers
from lightning_hetero.checkpoint.recovering.inventory import (
    Choice,
    ChoiceError,
    choose,
    holders_of_files,
)
from lightning_hetero.checkpoint.recovering.session import ExhaustedError, Session
from lightning_hetero.checkpoint.recovering.taking import Parts, take
from lightning_hetero.checkpoint.tiers import Tier
from lightning_hetero.core.errors import CheckpointError

__all__ = ["begin_run", "recover"]

_log = logging.getLogger(__name__)
_LOOKS = 20
"""Times to look again, if a run that still writes has deleted what was seen."""


def recover(
    needs: Sequence[SliceNeed],
    tiers: Sequence[Tier],
    *,
    node: str = "node",
    peers: Peers | None = None,
    step: int | None = None,
    skip_unreadable: bool = False,
) -> Recovered | None:
    """Restore the run's newest complete checkpoint; every rank calls it. Communicates.

    Args:
        needs: The slices that this rank keeps from now on.
        tiers: This node's tiers and the remote one.
        node: Name of this rank's node; equal on ranks that share the local tiers.
        peers: The ranks; None for a single one.
        step: Take only this step, of any run.
        skip_unreadable: Go on without tiers that can't be read.

    Returns:
        The state; None if there is none, except perhaps unfinished first saves.

    Raises:
        CheckpointError: There are checkpoints but none can be read, a tier can't be read, or `step`
            doesn't exist; all ranks raise it.
        PeerError: Another rank is gone.
    """
    session = Session.open(tiers, node, peers)
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
        if session.peers.global_rank == 0:
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
    peers: Peers | None = None,
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
        peers: The ranks; None for a single one.
        skip_unreadable: Go on without tiers that can't be read.
        anew: Whether a new run begins, whatever is in the places.

    Returns:
        Step 0 of the attempt.

    Raises:
        CheckpointError: As `recover`, or a lasting place can't be written; all ranks raise it.
    """
    session = Session.open(tiers, node, peers)
    if anew:
        run, attempt = session.peers.gather(new_run())[0], 0
    elif recovered is None:
        session.look()
        choice = choose(session.inventory, skip_unreadable=skip_unreadable)
        proposals = session.peers.gather(new_run())
        run = proposals[0] if choice.run is None else choice.run
        attempt = choice.attempt
    else:
        run, attempt = recovered.id.run, recovered.report.attempt
    own = session.looked_after
    session.peers.do(lambda _: mark_places(own, run), may_fail=skip_unreadable)
    return CheckpointId(0, attempt, run)


def _recover_from(
    session: Session,
    choice: Choice,
    checkpoint: CheckpointId,
    needs: Sequence[SliceNeed],
    skipped: list[str],
) -> Recovered:
    start_s, world_size = time.perf_counter(), choice.checkpoints[checkpoint]
    peers, seconds = session.peers, session.seconds
    manifests = session.share_manifests(checkpoint, world_size)
    seconds["manifests"] = time.perf_counter() - start_s
    start_s = time.perf_counter()
    source = Parts(
        manifests=manifests,
        holders=holders_of_files(session.inventory, manifests),
        own_part=peers.global_rank if world_size == peers.world_size else None,
        node=session.node,
        reach=session.reach,
    )
    taken = take(needs, source, peers)
    if isinstance(taken, str):
        raise ExhaustedError(f"{taken} Looked in {session.places}.")
    seconds["fetch"] = time.perf_counter() - start_s
    kind = min(held.holder.kind for held in session.inventory.held if held.id == checkpoint)
    return taken.recovered(
        checkpoint, seconds=seconds, skipped=skipped, attempt=choice.attempt, place=kind
    )
