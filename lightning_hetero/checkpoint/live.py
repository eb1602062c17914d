"""Recover a run's state from the memory of the remaining ranks after a loss, so no step is lost.

With redundancy each row of a parameter is kept by two ranks. If all remaining ranks have ended the
same step, and together have all rows, their slices are a complete checkpoint that wasn't saved.
Example: ranks 0, 1 and 2 each keep their own slice and that of the previous rank. If rank 1 is
lost, rank 2 still has rank 1's slice.

Each rank serves its slices from memory, as one more tier, and all read what they need from there as
they would from files. Joiners have nothing to serve, and get their slices from the others. What a
rank already has doesn't travel.

A rank that was in the middle of an optimizer's step has no usable state, and ranks that have ended
different steps have no common one. Then the newest saved checkpoint is used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_hetero.checkpoint.content import CheckpointContent, SliceNeed
from lightning_hetero.checkpoint.encoding import (
    FileBody,
    encode_part,
    make_manifest,
    metadata_files,
)
from lightning_hetero.checkpoint.fetching import Parts, Recovered, take
from lightning_hetero.checkpoint.manifest import PartManifest
from lightning_hetero.checkpoint.serving import PeerFiles, Readable
from lightning_hetero.checkpoint.statuses import Peers
from lightning_hetero.checkpoint.tiers import Location, TierKind
from lightning_hetero.core.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class LiveState:
    """A rank's state at the end of an optimizer step, in a generation that has ended."""

    content: CheckpointContent
    """All rows that the rank kept as owner or standby, in host memory; rank and world size are
    those of the generation that has ended."""
    generation: int
    """The number of the generation."""


class _LiveFiles:
    """Serves the files of a part whose tensors are in memory."""

    def __init__(self, bodies: Sequence[FileBody]) -> None:
        self._bodies = {body.name: body for body in bodies}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._bodies[name.rpartition("/")[2]].read(start, stop)


_LIVE = TierKind.LIVE.name


def recover_live(
    needs: Sequence[SliceNeed], own: LiveState | str | None, peers: Peers
) -> Recovered | str:
    """Return the last step's state, if all ranks have the same step and together all rows.

    Every rank calls it. Communicates.

    Args:
        needs: The slices that this rank keeps from now on.
        own: What this rank has in memory, or why it has nothing to go on from; None if it has just
            joined, or hasn't trained a step yet, and needs others' state.
        peers: The remaining ranks and joiners.

    Returns:
        The state; or why a saved checkpoint must be used, the same on all ranks.

    Raises:
        PeerError: Another rank is gone.
    """
    try:
        return _recover(needs, own, peers)
    except CheckpointError as error:
        return str(error)
    finally:
        peers.server.stores.pop(_LIVE, None)


def _recover(
    needs: Sequence[SliceNeed], own: LiveState | str | None, peers: Peers
) -> Recovered | str:
    offers = peers.gather(_offer(own, peers))
    if why := _why_not(offers):
        return why
    manifests, addresses, locations = {}, {}, {}
    for rank, item in enumerate(offers):
        if item is not None:
            manifest = PartManifest.decode(item["manifest"].encode())
            manifests[manifest.part] = manifest
            addresses[str(rank)] = item["address"]
            for entry in manifest.files:
                locations[manifest.part, entry.name] = [Location(str(rank), TierKind.LIVE)]

    def reach(location: Location) -> Readable:
        if location.node == str(peers.global_rank):
            return peers.server.stores[_LIVE]
        return PeerFiles(addresses[location.node], _LIVE, peers.timeout_s)

    any_part = next(iter(manifests.values()))
    parts = Parts(
        manifests=manifests,
        locations=locations,
        own_part=own.content.global_rank if isinstance(own, LiveState) else None,
        node=str(peers.global_rank),
        reach=reach,
        # A higher number, so that the checkpoints that follow count as newer than earlier ones.
        attempt=any_part.id.attempt + 1,
    )
    try:
        taken = take(needs, parts, peers)
    except CheckpointError as error:
        taken = str(error)
    lost = sorted(set(range(any_part.world_size)) - set(manifests))
    where = f"without ranks {lost} of the generation before: "
    return where + taken if isinstance(taken, str) else taken


def _offer(own: LiveState | str | None, peers: Peers) -> dict[str, Any] | None:
    """Serve this rank's state, and return what the other ranks must know about it."""
    if not isinstance(own, LiveState):
        return None if own is None else {"why": own}
    content = own.content
    try:
        metadata = metadata_files(content, with_shared=True)
        bodies, slices = encode_part(content, metadata, block_bytes=1)
        peers.server.stores[_LIVE] = _LiveFiles(bodies)
        manifest = make_manifest(content, bodies, slices, with_checksums=False)
        return {
            "generation": own.generation,
            "step": content.id.step,
            "manifest": manifest.encode().decode(),
            "address": None if peers.world_size == 1 else peers.server.address,
        }
    except Exception as error:
        # An error in a user's object mustn't end this rank: it can go on from a checkpoint.
        return {"why": f"{type(error).__name__}: {error}"}


def _why_not(offers: Sequence[Mapping[str, Any] | None]) -> str:
    """Return why ranks can't go on from their states; "" if nothing is known to prevent it."""
    left = {rank: offer for rank, offer in enumerate(offers) if offer is not None}
    for rank, offer in left.items():
        if "why" in offer:
            return f"rank {rank} has nothing of the last step: {offer['why']}"
    if 0 not in left:
        return "rank 0 has trained no step in this process"
    if len({(o["generation"], o["step"]) for o in left.values()}) > 1:
        steps = (f"rank {rank} to {o['step']}" for rank, o in left.items())
        return f"the ranks that are left had come to different steps ({', '.join(steps)})"
    return ""
