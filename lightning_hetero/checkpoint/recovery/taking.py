"""Take what a rank needs out of the parts of one state, wherever these are: in files or in memory.

All ranks do it at once and tell each other whether they have all: either every rank goes on from
that state, or none does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_hetero.checkpoint.format.content import RestoredSlice, SliceNeed
from lightning_hetero.checkpoint.format.manifest import CheckpointId, PartManifest
from lightning_hetero.checkpoint.peers.serving import Readable
from lightning_hetero.checkpoint.peers.statuses import Peers
from lightning_hetero.checkpoint.places.tiers import Location, Source
from lightning_hetero.checkpoint.recovery.assembly import Assembly, RankNeeds
from lightning_hetero.checkpoint.recovery.fetching import Fetcher, Locations
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.process import Progress

__all__ = ["Parts", "Recovered", "RecoveryReport", "take"]


@dataclass(frozen=True, kw_only=True)
class RecoveryReport:
    """Account of a recovery, for the log line after a restart."""

    id: CheckpointId
    """The checkpoint that was taken."""
    bytes_by_source: Mapping[Source, int]
    """Bytes that this rank got from each kind of source, whole blocks counted."""
    failures: tuple[str, ...]
    """Sources that were struck off, and why."""
    attempt: int
    """Attempt number for the checkpoints that this run saves."""
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that couldn't be used, and why."""

    def __str__(self) -> str:
        sources = ", ".join(
            f"{count / 1e6:.1f} MB from {source.name.lower().replace('_', ' ')}"
            for source, count in sorted(self.bytes_by_source.items())
        )
        text = f"recovered {self.id}: {sources or 'nothing needed'}"
        if self.failures:
            text += f"; {len(self.failures)} sources failed"
        if self.skipped:
            text += f"; {len(self.skipped)} newer checkpoints couldn't be used"
        return text


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """One rank's state."""

    id: CheckpointId
    """The checkpoint that it comes from."""
    world_size: int
    """Number of ranks that saved it."""
    plan: ParallelPlan | None
    """The plan under which it was saved."""
    slices: tuple[RestoredSlice, ...]
    """The needed slices, in the order of the needs."""
    metadata: Mapping[str, Any]
    """Rank 0's shared metadata."""
    rank_metadata: Mapping[str, Any] | None
    """This rank's own state; None if another number of ranks saved the checkpoint."""
    report: RecoveryReport


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of one state, and how a rank reaches them."""

    id: CheckpointId
    manifests: Mapping[int, PartManifest]
    locations: Locations
    own_part: int | None
    """The part that this rank itself saved, or holds; None if it has none."""
    node: str
    """Where this rank is, as locations call it."""
    reach: Callable[[Location], Readable | None]
    """See `Fetcher`."""
    attempt: int
    """Attempt number of the checkpoints that are saved next."""


@dataclass(frozen=True)
class _Refused:
    """No copy can serve this rank: the model isn't the one that was saved."""

    why: str


def take(needs: Sequence[SliceNeed], parts: Parts, peers: Peers) -> Recovered | str:
    """Return what this rank needs, or why a rank can't have all; the same kind on all ranks.

    Every rank calls it. Communicates.

    Raises:
        CheckpointError: The model or its optimizer isn't the one whose state this is.
        PeerError: Another rank is gone.
    """

    def describe(found: Recovered | _Refused | str) -> dict[str, str]:
        if isinstance(found, Recovered):
            return {}
        own = f"Rank {peers.global_rank}: "
        is_refused = isinstance(found, _Refused)
        return {"refused": own + found.why} if is_refused else {"missing": own + str(found)}  # type: ignore[union-attr]

    done, answers = peers.do(
        lambda progress: _take(needs, parts, peers.global_rank, progress), describe, may_fail=True
    )
    for answer in answers:
        if "refused" in answer:
            raise CheckpointError(answer["refused"])
    for answer in answers:
        if why := answer.get("missing") or answer.get("error"):
            return str(why)
    found = done.result()
    assert isinstance(found, Recovered)
    return found


def _take(
    needs: Sequence[SliceNeed], parts: Parts, turn: int, progress: Progress
) -> Recovered | _Refused | str:
    try:
        own = RankNeeds(needs, parts.manifests, parts.own_part)
    except CheckpointError as error:
        return _Refused(str(error))
    fetcher = Fetcher(
        parts.manifests, parts.locations, node=parts.node, reach=parts.reach, turn=turn
    )
    assembly = Assembly(own)
    try:
        fetcher.run(own.blocks(), assembly.deliver, progress)
        slices, metadata, rank_metadata = assembly.finish()
    except CheckpointError as error:
        tried = f" Tried: {'; '.join(fetcher.failures)}." if fetcher.failures else ""
        return f"{error}{tried}"
    first = next(iter(parts.manifests.values()))
    report = RecoveryReport(
        id=parts.id,
        bytes_by_source=dict(fetcher.bytes_by_source),
        failures=tuple(fetcher.failures),
        attempt=parts.attempt,
    )
    return Recovered(
        id=parts.id,
        world_size=first.world_size,
        plan=None if first.plan is None else ParallelPlan.from_dict(first.plan),
        slices=slices,
        metadata=metadata,
        rank_metadata=rank_metadata,
        report=report,
    )
