"""What all ranks of a recovery know: which rank reaches which tier, and what the tiers hold.

Every rank reports what its node's tiers hold, rank 0 also the remote one; manifests are read by one
rank for all.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from lightning_hetero.checkpoint.deadlines import Progress
from lightning_hetero.checkpoint.manifest import CheckpointId, PartManifest
from lightning_hetero.checkpoint.peers import Peers
from lightning_hetero.checkpoint.recovering.inventory import Inventory, take_inventory
from lightning_hetero.checkpoint.serving import Address, PeerFiles, Readable
from lightning_hetero.checkpoint.tiers import Holder, Tier, TierKind, read_manifest
from lightning_hetero.core.errors import CheckpointError

__all__ = ["ExhaustedError", "Session"]

_log = logging.getLogger(__name__)
_MARGIN = 1.5


class ExhaustedError(CheckpointError):
    """Something needed has no source left; all ranks raise it at the same point."""


@dataclass
class Session:
    """One rank's view of tiers and ranks while these try one checkpoint after another."""

    tiers: Sequence[Tier]
    peers: Peers
    node_of_rank: Sequence[str]
    addresses: Sequence[Address | None]
    """Where each rank serves its node's tiers; None for a single rank."""
    inventory: Inventory = field(default_factory=Inventory)
    """What all ranks together found when they looked last."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of each phase."""

    @classmethod
    def open(cls, tiers: Sequence[Tier], node: str, peers: Peers | None) -> Self:
        """Open a session, in which the ranks know each other's nodes; all call it. Communicates."""
        peers = peers or Peers()
        own = peers.serve(tiers)
        rows = peers.gather([node, own])
        return cls(tiers, peers, [row[0] for row in rows], [row[1] for row in rows])

    @property
    def node(self) -> str:
        """This rank's node."""
        return self.node_of_rank[self.peers.global_rank]

    @property
    def looked_after(self) -> list[Tier]:
        """The tiers that this rank looks after for all that share them."""
        rank = self.peers.global_rank
        is_first = self.node_of_rank.index(self.node) == rank
        return [t for t in self.tiers if t.is_looked_after_by(rank, is_first_of_node=is_first)]

    @property
    def places(self) -> str:
        """The places that were searched, for messages."""
        found = sorted({held.holder for held in self.inventory.held})
        return ", ".join(map(str, (*found, *self.tiers)))

    def tier_of(self, holder: Holder) -> Tier | None:
        """Return a holder's tier; None if this rank doesn't reach it."""
        return next((tier for tier in self.tiers if tier.holder(self.node) == holder), None)

    def reach(self, holder: Holder, turn: int) -> Readable | None:
        """Return from what to read a holder's files: its tier, or a rank of its node."""
        own = self.tier_of(holder)
        if own is not None:
            return own.store
        found = [
            address
            for name, address in zip(self.node_of_rank, self.addresses, strict=True)
            if name == holder.node and address is not None
        ]
        if holder.kind is TierKind.REMOTE or not found:
            return None
        address = found[turn % len(found)]
        return PeerFiles(address, holder.kind.name, self.peers.timeout_s)

    def look(self) -> bool:
        """Take an inventory with all ranks; return whether it has changed. Communicates.

        Raises:
            CheckpointError: A rank has failed; all ranks raise it.
        """
        start_s, before = time.perf_counter(), self.inventory
        _, reports = self.peers.do(self._take, lambda it: {"report": it.encode().decode()})
        self.inventory = Inventory.merge(
            Inventory.decode(report["report"].encode()) for report in reports
        )
        self.seconds["inventory"] = time.perf_counter() - start_s
        return self.inventory != before

    def _take(self, progress: Progress) -> Inventory:
        return take_inventory(
            self.looked_after,
            node=self.node,
            progress=progress,
            # Less than the others wait, so that it is reported as that place's failure.
            timeout_s=self.peers.timeout_s / _MARGIN,
        )

    def share_manifests(self, checkpoint: CheckpointId, world_size: int) -> dict[int, PartManifest]:
        """Return all manifests; the lowest rank that reaches one reads it for all. Communicates.

        Raises:
            ExhaustedError: Some can't be read any more; all ranks raise it.
        """
        holders: dict[int, list[Holder]] = defaultdict(list)
        for held in self.inventory.held:
            if (held.id, held.world_size) == (checkpoint, world_size):
                holders[held.part].append(held.holder)
        for items in holders.values():
            items.sort(key=lambda holder: (holder.kind, holder.node))

        def read_own(progress: Progress) -> list[str]:
            texts = []
            for part, items in sorted(holders.items()):
                if self._reader_of(part, items[0]) == self.peers.global_rank:
                    texts += self._read_any(checkpoint, part, items)
                    progress.tick()
            return texts

        _, answers = self.peers.do(read_own, lambda found: {"manifests": found}, may_fail=True)
        shared = (text for answer in answers for text in answer.get("manifests", ()))
        manifests = {
            manifest.part: manifest
            for manifest in (PartManifest.decode(text.encode()) for text in shared)
            if (manifest.id, manifest.world_size) == (checkpoint, world_size)
        }
        lost = sorted(set(range(world_size)) - set(manifests))
        if lost:
            raise ExhaustedError(
                f"The manifests of parts {lost} became unreadable. Looked in {self.places}."
            )
        return manifests

    def _reader_of(self, part: int, holder: Holder) -> int:
        if holder.kind is TierKind.REMOTE:
            return part % self.peers.world_size
        return self.node_of_rank.index(holder.node)

    def _read_any(
        self, checkpoint: CheckpointId, part: int, holders: Sequence[Holder]
    ) -> list[str]:
        for holder in holders:
            tier = self.tier_of(holder)
            if tier is not None:
                try:
                    return [read_manifest(tier.store, checkpoint, part).encode().decode()]
                except Exception as error:
                    # Stores raise their client library's own types; the next holder may do.
                    _log.warning("Manifest of part %d of %s: %s", part, checkpoint, error)
        return []
