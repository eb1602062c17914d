"""Take what a rank needs out of the parts of one state, wherever these are: in files or in memory.

All ranks do it at once and tell each other whether they have all: either every rank goes on from
that state, or none does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_hetero.checkpoint.content import (
    Recovered,
    RecoveryReport,
    RestoredSlice,
    SliceNeed,
)
from lightning_hetero.checkpoint.deadlines import Progress
from lightning_hetero.checkpoint.manifest import CheckpointId, PartManifest
from lightning_hetero.checkpoint.peers import Peers
from lightning_hetero.checkpoint.recovering.assembly import Assembly, RankNeeds
from lightning_hetero.checkpoint.recovering.fetching import Fetcher, Holders
from lightning_hetero.checkpoint.serving import Readable
from lightning_hetero.checkpoint.tiers import Holder, Source, TierKind
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.plan import ParallelPlan

__all__ = ["Parts", "Taken", "take"]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of one state, and how a rank reaches them."""

    manifests: Mapping[int, PartManifest]
    holders: Holders
    own_part: int | None
    """The part that this rank itself saved, or holds; None if it has none."""
    node: str
    """Where this rank is, as holders call it."""
    reach: Callable[[Holder, int], Readable | None]
    """See `Fetcher`."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What a rank has taken."""

    parts: Parts
    slices: tuple[RestoredSlice, ...]
    metadata: Mapping[str, Any]
    rank_metadata: Mapping[str, Any] | None
    bytes_by_source: Mapping[Source, int]
    failures: tuple[str, ...]

    def recovered(
        self,
        checkpoint: CheckpointId,
        *,
        seconds: Mapping[str, float],
        skipped: Sequence[str],
        attempt: int,
        place: TierKind,
    ) -> Recovered:
        """Return it as a recovered state; `attempt` is the next saves'."""
        first = next(iter(self.parts.manifests.values()))
        is_live = place is TierKind.LIVE
        return Recovered(
            id=checkpoint,
            world_size=first.world_size,
            plan=None if first.plan is None else ParallelPlan.from_dict(first.plan),
            slices=self.slices,
            metadata=self.metadata,
            rank_metadata=self.rank_metadata,
            report=RecoveryReport(
                id=checkpoint,
                bytes_by_source=self.bytes_by_source,
                seconds=dict(seconds),
                failures=self.failures,
                skipped=tuple(skipped),
                attempt=attempt,
                place="memory" if is_live else place.name.lower(),
            ),
        )


@dataclass(frozen=True)
class _Refused:
    """No copy can serve this rank: the model isn't the one that was saved."""

    why: str


def take(needs: Sequence[SliceNeed], parts: Parts, peers: Peers) -> Taken | str:
    """Return what this rank needs, or why a rank can't have all; the same kind on all ranks.

    Every rank calls it. Communicates.

    Raises:
        CheckpointError: The model or its optimizer isn't the one whose state this is.
        PeerError: Another rank is gone.
    """

    def describe(found: Taken | _Refused | str) -> dict[str, str]:
        if isinstance(found, Taken):
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
    assert isinstance(found, Taken)
    return found


def _take(
    needs: Sequence[SliceNeed], parts: Parts, turn: int, progress: Progress
) -> Taken | _Refused | str:
    try:
        own = RankNeeds(needs, parts.manifests, parts.own_part)
    except CheckpointError as error:
        return _Refused(str(error))
    fetcher = Fetcher(parts.manifests, parts.holders, node=parts.node, reach=parts.reach, turn=turn)
    assembly = Assembly(own)
    try:
        fetcher.run(own.blocks(), assembly.deliver, progress)
        slices, metadata, rank_metadata = assembly.finish()
    except CheckpointError as error:
        tried = f" Tried: {'; '.join(fetcher.failures)}." if fetcher.failures else ""
        return f"{error}{tried}"
    return Taken(
        parts=parts,
        slices=slices,
        metadata=metadata,
        rank_metadata=rank_metadata,
        bytes_by_source=dict(fetcher.bytes_by_source),
        failures=tuple(fetcher.failures),
    )
