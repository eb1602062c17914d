"""Recover a run's state from the ranks that are left after a loss, so that no step is lost.

With redundancy each row of a parameter is kept by two ranks. If a generation ends at the same step
on all ranks that are left, and these have all rows together, their slices are a complete checkpoint
that nobody had to save. Newcomers have no part of it, and get theirs from the others.

1. Each rank offers what it has, or says why it has nothing (one all-gather). A rank that was in the
   middle of an optimizer's step has nothing, and ranks at different steps have no common state.
   Then the newest checkpoint is used.
2. All ranks know which rank kept which rows in the old generation, and which keeps them in the new
   one. So each computes the same list of moves, and rows go straight from memory to memory.
3. Each says whether it has all its rows (one all-gather): all ranks go on from them, or none does.

Floor: each row is copied once; what a rank keeps itself doesn't travel.
"""

import pickle
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

from lightning_hetero.checkpoint.content import (
    CheckpointContent,
    Recovered,
    RecoveryReport,
    SliceContent,
    SliceNeed,
)
from lightning_hetero.checkpoint.manifest import CheckpointId
from lightning_hetero.checkpoint.pieces import (
    Piece,
    cut_piece,
    is_followed,
    joined,
    pack,
    unpack,
)
from lightning_hetero.checkpoint.tiers import Source
from lightning_hetero.checkpoint.transport import Transport, gather_json, take_turns
from lightning_hetero.core.owners import serve_without
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.slices import Interval, Slice

__all__ = [
    "Follows",
    "Keepers",
    "LiveState",
    "Move",
    "Newcomer",
    "NothingLive",
    "find_moves",
    "recover_from_survivors",
    "why_not",
]


class Follows(StrEnum):
    """What follows the step whose state was noted."""

    STEP = "a step"
    END = "the end of an epoch or of training"
    EPOCH = "an epoch"


@dataclass(frozen=True, kw_only=True)
class Keepers:
    """Which ranks keep which rows of each parameter in a generation; the same on all its ranks."""

    slices: Mapping[str, tuple[Slice, ...]]
    dims: Mapping[str, int]
    """Dim along which each parameter is cut."""


@dataclass(frozen=True, kw_only=True)
class LiveState:
    """A rank's state at the end of an optimizer step, in a generation that has ended."""

    content: CheckpointContent
    """All rows that the rank kept, as owner or standby, on the host; its rank and size are old."""
    generation: int
    """The number of the generation."""
    keepers: Keepers
    """The keepers in that generation."""
    follows: Follows = Follows.STEP
    """What follows the step; must be the same on all ranks."""


@dataclass(frozen=True)
class NothingLive:
    """A rank has no state to go on from."""

    why: str
    """The reason."""


@dataclass(frozen=True)
class Newcomer:
    """A rank has just joined, or has trained no step yet: it gets its state from the others."""


@dataclass(frozen=True, slots=True)
class Move:
    """Rows of a parameter, along its old dim, that one rank gives to another or keeps for itself.

    `source` and `target` are ranks of the new generation.
    """

    parameter: str
    start: int
    stop: int
    source: int
    target: int


def recover_from_survivors(
    needs: Sequence[SliceNeed],
    keepers: Keepers,
    own: LiveState | NothingLive | Newcomer,
    transport: Transport,
) -> Recovered | NothingLive:
    """Return the last step's state, if all ranks have the same step and together all rows.

    Every rank calls it. Communicates.

    Args:
        needs: The slices that this rank keeps from now on.
        keepers: Which ranks keep which rows from now on.
        own: What this rank still has.
        transport: Connects the ranks that are left, and newcomers.

    Returns:
        The state; or why a saved checkpoint must be used, the same on all ranks.

    Raises:
        PeerError: Another rank is gone.
    """
    rank = transport.global_rank
    metadata, own = _encoded(own) if rank == 0 else (b"", own)
    offers = gather_json(transport, _offer_of(own))
    why = why_not(offers, own.keepers.slices if isinstance(own, LiveState) else {})
    # Newcomers don't know who kept which rows.
    whys = gather_json(transport, why) if any("new" in offer for offer in offers) else [why]
    if why := next(filter(None, whys), ""):
        return NothingLive(why)
    told = _tell(own, metadata, transport)
    rank_now = {offer["rank"]: new for new, offer in enumerate(offers) if "new" not in offer}
    moves = find_moves(told.keepers, keepers, rank_now)
    kept = own.content if isinstance(own, LiveState) else None
    found, errors = _carry_out(moves, () if kept is None else kept.slices, transport)
    state = None
    try:
        state = _put_together(needs, found, told, kept)
    except Exception as error:
        # An error of a user's object mustn't end a rank that can go on from a checkpoint.
        errors.append(repr(error))
    told_errors = gather_json(transport, [f"Rank {rank}: {error}" for error in errors])
    why = " ".join(error for item in told_errors for error in item)
    return NothingLive(why) if why or state is None else state


@dataclass(frozen=True, kw_only=True)
class _Told:
    """What rank 0 tells all: the parts of the state that are the same on all ranks."""

    metadata: bytes
    id: CheckpointId
    saved_by: int
    plan: ParallelPlan | None
    keepers: Keepers
    """Of the generation that has ended."""


def _encoded(
    own: LiveState | NothingLive | Newcomer,
) -> tuple[bytes, LiveState | NothingLive | Newcomer]:
    """Return the pickled metadata, and what to offer: nothing, if they can't be pickled."""
    if not isinstance(own, LiveState):
        return b"", own
    try:
        return pickle.dumps(own.content.metadata), own
    except Exception as error:
        # Any object that a callback or a module saves may fail to be pickled.
        return b"", NothingLive(f"{type(error).__name__}: {error}")


def _tell(own: LiveState | NothingLive | Newcomer, metadata: bytes, transport: Transport) -> _Told:
    if transport.global_rank != 0:
        told: _Told = pickle.loads(transport.receive(0))
        return told
    assert isinstance(own, LiveState)
    content = own.content
    told = _Told(
        metadata=metadata,
        id=content.id,
        saved_by=content.world_size,
        plan=content.plan,
        keepers=own.keepers,
    )
    message = pickle.dumps(told)
    for rank in range(1, transport.world_size):
        transport.send(message, rank)
    return told


def _offer_of(own: LiveState | NothingLive | Newcomer) -> dict[str, Any]:
    if isinstance(own, Newcomer):
        return {"new": True}
    if isinstance(own, NothingLive):
        return {"why": own.why}
    content = own.content
    return {
        "generation": own.generation,
        "step": content.id.step,
        "follows": own.follows,
        "rank": content.global_rank,
        "size": content.world_size,
    }


def why_not(offers: Sequence[Mapping[str, Any]], slices: Mapping[str, tuple[Slice, ...]]) -> str:
    """Return why ranks can't go on from what they have; "" if they can.

    Args:
        offers: What each rank has, by rank: "generation", "step", what "follows", and the old
            "rank" and "size"; or "why" it has nothing; or that it is "new".
        slices: The slices, with their keepers, in that generation.
    """
    for rank, offer in enumerate(offers):
        if "why" in offer:
            return f"rank {rank} has nothing of the last step: {offer['why']}"
    left = {rank: offer for rank, offer in enumerate(offers) if "new" not in offer}
    if 0 not in left:
        return "rank 0 has trained no step in this process"
    if len({(o["generation"], o["step"], o["follows"]) for o in left.values()}) > 1:
        steps = (f"rank {rank} to {o['step']} before {o['follows']}" for rank, o in left.items())
        return f"the ranks that are left had come to different steps ({', '.join(steps)})"
    if left[0]["follows"] == Follows.END and len(left) < len(offers):
        return "newcomers don't know what was gathered for the end of the epoch"
    lost = set(range(left[0]["size"])) - {offer["rank"] for offer in left.values()}
    missing = serve_without(slices, lost).missing
    if missing:
        name, rows = next(iter(missing.items()))
        return (
            f"rows of {len(missing)} parameters, such as {name} [{rows[0][0]}, {rows[0][1]}), were "
            f"kept by lost ranks alone ({sorted(lost)} of the generation before)"
        )
    return ""


def find_moves(before: Keepers, after: Keepers, rank_now: Mapping[int, int]) -> list[Move]:
    """Return all moves of rows, in the same order on all ranks.

    A rank takes rows from itself if it kept them; else their keepers take turns to give them.

    Args:
        before: The keepers in the generation that has ended.
        after: The keepers in the one that begins.
        rank_now: The new rank of each old rank that is left.
    """
    known: dict[Hashable, list[tuple[int, int, int, int]]] = {}
    moves = []
    for name, slices in after.slices.items():
        old, is_same_dim = before.slices[name], before.dims[name] == after.dims[name]
        key = id(old), id(slices), is_same_dim
        if key not in known:
            found = _moves_of(old, slices, rank_now, is_same_dim=is_same_dim)
            known[key] = list(dict.fromkeys(found))
        moves += [Move(name, *item) for item in known[key]]
    return moves


def _moves_of(
    old: Sequence[Slice], new: Sequence[Slice], rank_now: Mapping[int, int], *, is_same_dim: bool
) -> Iterator[tuple[int, int, int, int]]:
    for item in new:
        # If the cut dim has changed, each new slice needs a part of all old rows.
        rows: Interval = (item.start, item.stop) if is_same_dim else (0, old[-1].stop)
        for target in item.keepers:
            for piece in old:
                start, stop = max(rows[0], piece.start), min(rows[1], piece.stop)
                if start < stop:
                    here = [rank_now[keeper] for keeper in piece.keepers if keeper in rank_now]
                    yield (
                        start,
                        stop,
                        target if target in here else here[target % len(here)],
                        target,
                    )


@dataclass(frozen=True)
class _Found:
    """The pieces that a rank has got."""

    pieces: dict[str, list[Piece]] = field(default_factory=partial(defaultdict, list))
    """By parameter."""
    num_bytes: Counter[Source] = field(default_factory=Counter)

    def take(self, source: Source, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self.pieces[piece.parameter].append(piece)
            self.num_bytes[source] += piece.num_bytes


def _carry_out(
    moves: Sequence[Move], kept: Sequence[SliceContent], transport: Transport
) -> tuple[_Found, list[str]]:
    """Carry out this rank's moves; return the pieces that it got, and what went wrong.

    Every message is sent and received even after errors, so that no rank waits in vain.
    """
    rank, found, errors = transport.global_rank, _Found(), list[str]()
    own: dict[str, list[SliceContent]] = defaultdict(list)
    for item in kept:
        own[item.parameter].append(item)
    try:
        found.take(Source.OWN_MEMORY, _cut(moves, own, rank, rank))
    except Exception as error:
        errors.append(repr(error))
    pairs = list(dict.fromkeys((m.source, m.target) for m in moves if m.source != m.target))
    for source, target in (pairs[turn] for turn in take_turns(pairs)):
        if source == rank:
            for message in pack(partial(_cut, moves, own, source, target)):
                transport.send(message, target)
        elif target == rank:
            has_more = True
            while has_more:
                message = transport.receive(source)
                has_more = is_followed(message)
                try:
                    found.take(Source.PEER_MEMORY, unpack(message))
                except Exception as error:
                    errors.append(repr(error))
    return found, errors


def _cut(
    moves: Sequence[Move], kept: Mapping[str, Sequence[SliceContent]], source: int, target: int
) -> list[Piece]:
    return [
        cut_piece(item, max(move.start, item.start), min(move.stop, item.stop))
        for move in moves
        if (move.source, move.target) == (source, target)
        for item in kept[move.parameter]
        if item.start < move.stop and item.stop > move.start
    ]


def _put_together(
    needs: Sequence[SliceNeed], found: _Found, told: _Told, own: CheckpointContent | None
) -> Recovered:
    return Recovered(
        id=told.id,
        world_size=told.saved_by,
        plan=told.plan,
        slices=tuple(
            joined(need, found.pieces[need.parameter])
            for need in needs
            if need.parameter in found.pieces or not need.is_optional
        ),
        metadata=pickle.loads(told.metadata),
        rank_metadata=None if own is None else own.rank_metadata,
        report=RecoveryReport(
            id=told.id,
            bytes_by_source=dict(found.num_bytes),
            seconds={},
            failures=(),
            skipped=(),
            # So that checkpoints saved from now on count as newer than the earlier ones.
            attempt=told.id.attempt + 1,
            place="memory",
        ),
    )
