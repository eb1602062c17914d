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
from dataclasses import replace

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

_log = logging.getLogger(__name__)
_LOOKS = 20
"""Largest number of inventories that are taken: another run may delete checkpoints in between, and
then the next one is taken."""


class _ExhaustedError(CheckpointError):
    """Some needed bytes have no source left; all ranks raise this error at the same point."""


class Recovery:
    """One rank's part in a recovery. All ranks make the same calls, which communicate.

        recovery = Recovery([disk, bucket], node="node-3", peers=peers)
        recovered = recovery.recover(needs)
        start = recovery.begin_run(recovered)

    Args:
        tiers: This node's tiers and the remote one.
        node: Name of this rank's node; equal on ranks that share the local tiers.
        peers: The ranks; None for a single one.
        skip_unreadable: Whether to go on without tiers that can't be read.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        node: str = "node",
        peers: Peers | None = None,
        skip_unreadable: bool = False,
    ) -> None:
        self._tiers = tiers
        self._node = node
        self._peers = peers = peers or Peers()
        self._skip_unreadable = skip_unreadable
        rows = peers.gather([node, peers.serve(own_stores(tiers))])
        self.node_of_rank: tuple[str, ...] = tuple(row[0] for row in rows)
        """Name of each rank's node."""
        self._addresses: list[Address | None] = [row[1] for row in rows]
        self._inventory = Inventory()
        """The last inventory of all ranks."""
        self._manifests: Manifests = {}
        """The manifests that this rank has read."""

    def recover(self, needs: Sequence[SliceNeed], *, step: int | None = None) -> Recovered | None:
        """Restore the run's newest complete checkpoint.

        Args:
            needs: The slices that this rank keeps from now on.
            step: Recover this step only, of any run; None takes the newest.

        Returns:
            The state; None if no checkpoint was ever complete.

        Raises:
            CheckpointError: There are checkpoints but none can be read, a tier can't be read, or
                `step` doesn't exist; all ranks raise it.
            PeerError: Another rank is gone.
        """
        before: Inventory | None = None
        failure: CheckpointError | None = None
        for _ in range(_LOOKS):
            self._look()
            if self._inventory == before:
                break
            before, found, failure = self._inventory, None, None
            try:
                choice = choose(before, step=step, skip_unreadable=self._skip_unreadable)
                found = self._recover_newest(choice, needs)
            except _ExhaustedError as error:
                failure = error
            except ChoiceError as error:
                failure = CheckpointError(f"{error} Looked in {self._places}.")
            if found is not None:
                return found
        if failure is not None:
            raise failure
        return None

    def begin_run(self, recovered: Recovered | None = None, *, anew: bool = False) -> CheckpointId:
        """Return the run's identity and this start's attempt number, as an id of step 0.

        The identity is the one found in the lasting places, or a new one, and is written to all of
        them. Because of identity and attempt number, parts that another start or another run has
        left are never mistaken for this start's.

        Args:
            recovered: The state that ranks go on from.
            anew: Whether to begin a new run, whatever the tiers contain.

        Raises:
            CheckpointError: As `recover`, or a lasting place can't be written; all ranks raise it.
        """
        if recovered is not None:
            run, attempt = recovered.id.run, recovered.attempt
        else:
            run, attempt = self._peers.gather(new_run())[0], 0
            if not anew:
                self._look()
                choice = choose(self._inventory, skip_unreadable=self._skip_unreadable)
                run = run if choice.run is None else choice.run
                attempt = choice.attempt
        own = self._maintained
        # The place of a recovered state already has the run's identity, so writing it to others may
        # fail.
        may_fail = self._skip_unreadable or recovered is not None
        self._peers.do(lambda _: mark_places(own, run), may_fail=may_fail)
        return CheckpointId(0, attempt, run)

    def _recover_newest(self, choice: Choice, needs: Sequence[SliceNeed]) -> Recovered | None:
        peers = self._peers
        if peers.global_rank == 0:
            for text in self._inventory.broken:
                _log.warning("Not counted as a checkpoint: %s", text)
        skipped: list[str] = []
        for checkpoint, world_size in choice.checkpoints.items():
            manifests = self._share_manifests(checkpoint, world_size)
            parts = Parts(
                manifests=manifests,
                locations=locations_of_files(self._inventory, manifests),
                own_part=peers.global_rank if world_size == peers.world_size else None,
                node=self._node,
                reach=self._reach,
                attempt=choice.attempt,
            )
            taken = take(needs, parts, peers)
            if isinstance(taken, Recovered):
                return replace(taken, skipped=tuple(skipped))
            skipped.append(f"{checkpoint}: {taken} Looked in {self._places}.")
            _log.warning("%s can't be used: %s", checkpoint, taken)
        if skipped:
            raise _ExhaustedError(" ".join(skipped))
        return None

    @property
    def _maintained(self) -> list[Tier]:
        """The tiers that this rank lists, marks and prunes for all ranks that share them."""
        rank = self._peers.global_rank
        is_first = self.node_of_rank.index(self._node) == rank
        return [t for t in self._tiers if t.is_maintained_by(rank, is_first_of_node=is_first)]

    @property
    def _places(self) -> str:
        """The places that were searched, for messages."""
        found = sorted({held.location for held in self._inventory.held})
        return ", ".join(map(str, (*found, *self._tiers)))

    def _reach(self, location: Location) -> Readable | None:
        """Return what to read a location's files from: a tier, or a rank on its node."""
        for tier in self._tiers:
            if tier.location(self._node) == location:
                return tier.store
        found = [
            address
            for name, address in zip(self.node_of_rank, self._addresses, strict=True)
            if name == location.node and address is not None
        ]
        if location.kind is TierKind.REMOTE or not found:
            return None
        # Each reader takes another rank of that node, in turn.
        address = found[self._peers.global_rank % len(found)]
        return PeerFiles(address, location.kind.name, self._peers.timeout_s)

    def _look(self) -> None:
        """Take an inventory with all ranks.

        Raises:
            CheckpointError: A rank has failed; all ranks raise it.
        """
        self._manifests.clear()
        _, reports = self._peers.do(self._take, lambda it: {"report": it.encode()})
        self._inventory = Inventory.merge(Inventory.decode(report["report"]) for report in reports)

    def _take(self, progress: Progress) -> Inventory:
        return take_inventory(
            self._maintained,
            node=self._node,
            manifests=self._manifests,
            progress=progress,
            # Shorter than other ranks wait for this one, so that the error names the place, not the
            # rank.
            timeout_s=self._peers.timeout_s / MARGIN,
        )

    def _share_manifests(self, checkpoint: CheckpointId, size: int) -> dict[int, PartManifest]:
        """Return all manifests of a checkpoint of `size` parts. Communicates."""
        wanted = [self._manifests.get((checkpoint, size, part)) for part in range(size)]
        own = [manifest.encode().decode() for manifest in wanted if manifest is not None]
        shared = [text for texts in self._peers.gather(own) for text in texts]
        found = [PartManifest.decode(text.encode()) for text in dict.fromkeys(shared)]
        return {manifest.part: manifest for manifest in found}
