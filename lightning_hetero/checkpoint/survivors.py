"""Go on from what the ranks that are left still have, where others were lost: no step is lost.

With redundancy each row of a parameter is kept by two ranks. Where a generation ends at one step on
all ranks that are left, and they have all rows together, their slices are a complete checkpoint
that nobody had to save: each puts its own into the memory of its process, and all recover from
there as from any other place, onto the slices of the next generation.

Nothing is taken on trust: who was in the middle of an optimizer's step offers nothing, and who is a
step ahead of another one is no part of the same checkpoint. Then the newest one that was saved
counts.

Floor: each row is encoded, checked and read once; what a rank keeps itself doesn't travel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_hetero.checkpoint.content import CheckpointContent, Recovered, SliceNeed
from lightning_hetero.checkpoint.parts import write_manifest
from lightning_hetero.checkpoint.recovering.recovery import recover
from lightning_hetero.checkpoint.saving.encoding import encode_part, make_manifest, metadata_files
from lightning_hetero.checkpoint.saving.snapshot import Snapshot
from lightning_hetero.checkpoint.store import ProcessStore
from lightning_hetero.checkpoint.tiers import Tier, TierKind
from lightning_hetero.checkpoint.transport import Transport, gather_json
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.owners import serve_without
from lightning_hetero.core.slices import Slice

__all__ = ["LiveState", "NothingLive", "recover_from_survivors", "why_not"]


@dataclass(frozen=True, kw_only=True)
class LiveState:
    """A rank's state of a generation that has ended, as of the end of an optimizer step."""

    content: CheckpointContent
    """All rows that it keeps, as owner or standby, on the host; rank and size are of then."""
    generation: int
    """The number of the generation."""
    owners: Mapping[str, tuple[Slice, ...]]
    """Who kept which rows of each parameter; the same on all its ranks."""


@dataclass(frozen=True)
class NothingLive:
    """A rank has nothing to go on from."""

    why: str
    """Why not."""


def recover_from_survivors(
    needs: Sequence[SliceNeed], own: LiveState | NothingLive, transport: Transport
) -> Recovered | NothingLive:
    """Return the state of the last step, if all ranks are at one and have all rows together.

    Every rank calls it. Communicates.

    Args:
        needs: What this rank keeps from now on.
        own: What it still has.
        transport: The ranks that are left.

    Returns:
        The state; or, the same on all ranks, why a saved checkpoint has to be taken.

    Raises:
        PeerError: Another rank is gone.
    """
    offers = gather_json(transport, _offer_of(own))
    why = why_not(offers, own.owners if isinstance(own, LiveState) else {})
    if why:
        return NothingLive(why)
    assert isinstance(own, LiveState)
    rank, size = transport.global_rank, transport.world_size
    store = ProcessStore("survivors")
    try:
        _write(store, replace(own.content, global_rank=rank, world_size=size))
        error = ""
    except CheckpointError as failure:
        error = f"Rank {rank}: {failure}"
    errors = [item for item in gather_json(transport, error) if item]
    if errors:
        return NothingLive(" ".join(errors))
    tier = Tier(kind=TierKind.MEMORY, store=store)
    try:
        # Each process is a node of its own here: nobody else reaches its memory.
        found = recover(needs, [tier], node=f"survivor-{rank}", transport=transport)
    except CheckpointError as failure:
        return NothingLive(str(failure))
    return found or NothingLive("what the ranks have kept isn't complete")


def _offer_of(own: LiveState | NothingLive) -> dict[str, Any]:
    if isinstance(own, NothingLive):
        return {"why": own.why}
    content = own.content
    return {
        "generation": own.generation,
        "step": content.id.step,
        "rank": content.global_rank,
        "size": content.world_size,
    }


def why_not(offers: Sequence[Mapping[str, Any]], owners: Mapping[str, tuple[Slice, ...]]) -> str:
    """Return why ranks can't go on from what they have, nothing if they can.

    Args:
        offers: What each rank has, by rank: "generation", "step", "rank" and "size" of then; or
            "why" it has nothing.
        owners: Who kept which rows in that generation.
    """
    for rank, offer in enumerate(offers):
        if "why" in offer:
            return f"rank {rank} has nothing of the last step: {offer['why']}"
    moments = {(offer["generation"], offer["step"]) for offer in offers}
    if len(moments) > 1:
        steps = ", ".join(f"rank {r} step {offer['step']}" for r, offer in enumerate(offers))
        return f"the ranks that are left had come to different steps ({steps})"
    left = {offer["rank"] for offer in offers}
    lost = set(range(offers[0]["size"])) - left
    missing = serve_without(owners, lost).missing
    if missing:
        name, rows = next(iter(missing.items()))
        return (
            f"rows of {len(missing)} parameters, such as {name} [{rows[0][0]}, {rows[0][1]}), were "
            f"kept by lost ranks alone ({sorted(lost)} of the generation before)"
        )
    return ""


def _write(store: ProcessStore, content: CheckpointContent) -> None:
    bodies, slices = encode_part(Snapshot.of(content), metadata_files(content))
    for body in bodies:
        store.write(f"{content.id.folder}/{body.name}", body)
    write_manifest(store, make_manifest(content, bodies, slices))
