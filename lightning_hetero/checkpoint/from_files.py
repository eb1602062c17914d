"""Recover a run's state from files; all ranks do it together.

1. Every rank reports what its node's tiers have, and the run's newest complete checkpoint is chosen
   (`inventory`). The manifests that were read for this are sent to all ranks.
2. Every rank reads the bytes that it needs, each from its cheapest source (`fetching`): from its
   own tiers and the remote store directly, from other nodes' tiers by HTTP.
3. All ranks say whether they have everything. If not, all try the next older complete checkpoint.

Example: ranks 0 and 1 have saved steps 100 and 200. Then rank 1's node is lost with its disk, and
there is no copy of its part of step 200. Both ranks go on from step 100, whose parts are in the
remote store.

Ranks wait for storage as long as it makes progress, and give it up if it hangs. Steps 2 and 3
(`take`) also recover states that aren't in files (`live`).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lightning_hetero.checkpoint.claims import mark_places, new_run
from lightning_hetero.checkpoint.content import SliceNeed
from lightning_hetero.checkpoint.deadlines import MARGIN
from lightning_hetero.checkpoint.fetching import Parts, Recovered, take
from lightning_hetero.checkpoint.inventory import (
    Choice,
    ChoiceError,
    Inventory,
    Manifests,
    choose,
    locations_of_files,
    take_inventory,
)
from lightning_hetero.checkpoint.manifest import CheckpointId, PartManifest
from lightning_hetero.checkpoint.serving import Address, PeerFiles, Readable
from lightning_hetero.checkpoint.statuses import Peers
from lightning_hetero.checkpoint.tiers import Location, Tier, TierKind, own_stores
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.process import Progress

__all__ = ["begin_run", "recover"]

_log = logging.getLogger(__name__)
_LOOKS = 20
"""Largest number of inventories, if another run deletes checkpoints in between."""


class _ExhaustedError(CheckpointError):
    """Some needed bytes have no source left; all ranks raise this error at the same point."""


@dataclass
class _Search:
    """One rank's part in a search: ranks try one checkpoint after another."""

    tiers: Sequence[Tier]
    peers: Peers
    node_of_rank: Sequence[str]
    addresses: Sequence[Address | None]
    """Where each rank serves its node's tiers; None for a single rank."""
    inventory: Inventory = field(default_factory=Inventory)
    """The last inventory of all ranks."""
    manifests: Manifests = field(default_factory=dict)
    """The manifests that this rank has read."""

    @classmethod
    def open(cls, tiers: Sequence[Tier], node: str, peers: Peers | None) -> "_Search":
        """Begin a search: ranks tell each other their nodes. All ranks call it. Communicates."""
        peers = peers or Peers()
        own = peers.serve(own_stores(tiers))
        rows = peers.gather([node, own])
        return cls(tiers, peers, [row[0] for row in rows], [row[1] for row in rows])

    @property
    def node(self) -> str:
        """This rank's node."""
        return self.node_of_rank[self.peers.global_rank]

    @property
    def looked_after(self) -> list[Tier]:
        """The tiers that this rank lists and marks for all ranks that share them."""
        rank = self.peers.global_rank
        is_first = self.node_of_rank.index(self.node) == rank
        return [t for t in self.tiers if t.is_looked_after_by(rank, is_first_of_node=is_first)]

    @property
    def places(self) -> str:
        """The places that were searched, for messages."""
        found = sorted({held.location for held in self.inventory.held})
        return ", ".join(map(str, (*found, *self.tiers)))

    def reach(self, location: Location) -> Readable | None:
        """Return what to read a location's files from: a tier, or a rank on its node."""
        for tier in self.tiers:
            if tier.location(self.node) == location:
                return tier.store
        found = [
            address
            for name, address in zip(self.node_of_rank, self.addresses, strict=True)
            if name == location.node and address is not None
        ]
        if location.kind is TierKind.REMOTE or not found:
            return None
        # Each reader takes another rank of that node, in turn.
        address = found[self.peers.global_rank % len(found)]
        return PeerFiles(address, location.kind.name, self.peers.timeout_s)

    def look(self) -> bool:
        """Take an inventory with all ranks; return whether it has changed. Communicates.

        Raises:
            CheckpointError: A rank has failed; all ranks raise it.
        """
        before = self.inventory
        self.manifests.clear()
        _, reports = self.peers.do(self._take, lambda it: {"report": it.encode()})
        self.inventory = Inventory.merge(Inventory.decode(report["report"]) for report in reports)
        return self.inventory != before

    def _take(self, progress: Progress) -> Inventory:
        return take_inventory(
            self.looked_after,
            node=self.node,
            manifests=self.manifests,
            progress=progress,
            # Shorter than other ranks wait for this one, so that the error names the place, not the
            # rank.
            timeout_s=self.peers.timeout_s / MARGIN,
        )

    def share_manifests(self, checkpoint: CheckpointId, size: int) -> dict[int, PartManifest]:
        """Return all manifests of a checkpoint of `size` parts. Communicates."""
        wanted = [self.manifests.get((checkpoint, size, part)) for part in range(size)]
        own = [manifest.encode().decode() for manifest in wanted if manifest is not None]
        shared = [text for texts in self.peers.gather(own) for text in texts]
        found = [PartManifest.decode(text.encode()) for text in dict.fromkeys(shared)]
        return {manifest.part: manifest for manifest in found}


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
        step: Recover this step only, of any run; None takes the newest.
        skip_unreadable: Whether to go on without tiers that can't be read.

    Returns:
        The state; None if no checkpoint was ever complete.

    Raises:
        CheckpointError: There are checkpoints but none can be read, a tier can't be read, or `step`
            doesn't exist; all ranks raise it.
        PeerError: Another rank is gone.
    """
    search = _Search.open(tiers, node, peers)
    failure: CheckpointError | None = None
    for _ in range(_LOOKS):
        if not search.look():
            break
        found, failure = None, None
        try:
            choice = choose(search.inventory, step=step, skip_unreadable=skip_unreadable)
            found = _recover_newest(search, choice, needs)
        except _ExhaustedError as error:
            failure = error
        except ChoiceError as error:
            failure = CheckpointError(f"{error} Looked in {search.places}.")
        if found is not None:
            return found
    if failure is not None:
        raise failure
    return None


def _recover_newest(
    search: _Search, choice: Choice, needs: Sequence[SliceNeed]
) -> Recovered | None:
    if search.peers.global_rank == 0:
        for text in search.inventory.broken:
            _log.warning("Not counted as a checkpoint: %s", text)
    skipped: list[str] = []
    for checkpoint, world_size in choice.checkpoints.items():
        peers = search.peers
        manifests = search.share_manifests(checkpoint, world_size)
        parts = Parts(
            manifests=manifests,
            locations=locations_of_files(search.inventory, manifests),
            own_part=peers.global_rank if world_size == peers.world_size else None,
            node=search.node,
            reach=search.reach,
            attempt=choice.attempt,
        )
        taken = take(needs, parts, peers)
        if isinstance(taken, Recovered):
            report = replace(taken.report, skipped=tuple(skipped))
            return replace(taken, report=report)
        skipped.append(f"{checkpoint}: {taken} Looked in {search.places}.")
        _log.warning("%s can't be used: %s", checkpoint, taken)
    if skipped:
        raise _ExhaustedError(" ".join(skipped))
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
    """Return the run's identity and this start's attempt number, as an id of step 0.

    Every rank calls it after `recover`, with the result of that. Communicates. The identity is the
    one found in the lasting places, or a new one, and is written to all of them. Because of
    identity and attempt number, parts that another start or another run has left are never mistaken
    for this start's.

    Args:
        tiers: This node's tiers and the remote one.
        recovered: What `recover` returned.
        node: Name of this rank's node.
        peers: The ranks; None for a single one.
        skip_unreadable: Whether to go on without tiers that can't be read.
        anew: Whether to begin a new run, whatever the tiers contain.

    Raises:
        CheckpointError: As `recover`, or a lasting place can't be written; all ranks raise it.
    """
    search = _Search.open(tiers, node, peers)
    if recovered is not None:
        run, attempt = recovered.id.run, recovered.report.attempt
    else:
        run, attempt = search.peers.gather(new_run())[0], 0
        if not anew:
            search.look()
            choice = choose(search.inventory, skip_unreadable=skip_unreadable)
            run = run if choice.run is None else choice.run
            attempt = choice.attempt
    own = search.looked_after
    # The place of a recovered state already has the run's identity, so writing it to others may
    # fail.
    may_fail = skip_unreadable or recovered is not None
    search.peers.do(lambda _: mark_places(own, run), may_fail=may_fail)
    return CheckpointId(0, attempt, run)
