"""One rank's access to the places where a run keeps checkpoints: leases, run identity, writer.

A *lease* of a place is a file there that keeps other jobs from writing to it. A rank may save only
after three steps: it takes the leases; it recovers the newest checkpoint, unless the ranks still
have a newer state in memory; and it enters the run, which gives its checkpoints an identity.
"""

import logging
from collections.abc import Sequence

import lightning.pytorch as pl

from lightning_hetero.callbacks.checkpointing.places import Places, free_memory
from lightning_hetero.checkpoint import (
    CheckpointId,
    CheckpointWriter,
    Peers,
    Recovered,
    SliceNeed,
    Tier,
    TierKind,
    WriterOptions,
    begin_run,
    recover,
)
from lightning_hetero.checkpoint.claims import Lease
from lightning_hetero.checkpoint.serving import own_host
from lightning_hetero.checkpoint.store import check_store
from lightning_hetero.core.process import Progress
from lightning_hetero.strategy.run import run_of

__all__ = ["Access", "peers_of", "probe"]

_log = logging.getLogger(__name__)


class Access:
    """One rank's access. All ranks make the same calls, which communicate.

    In this order:

    1. `take_leases`, so that no other job writes to the places,
    2. `recover`, unless there is a state already,
    3. `enter`, after which the `writer` saves,
    4. `leave`.

    Args:
        places: This node's places.
        peers: All ranks; used by one thread at a time.
        is_first_of_node: Whether this rank takes care of its node's places for all ranks of the
            node.
        options: Options of the writer.
        skip_unreadable: Whether to go on without places that can't be read.
    """

    def __init__(
        self,
        places: Places,
        peers: Peers,
        *,
        is_first_of_node: bool,
        options: WriterOptions,
        skip_unreadable: bool = False,
    ) -> None:
        self.node_of_rank: tuple[str, ...] = ()
        """Name of each rank's node, once leases are taken."""
        self._places = places
        self._peers = peers
        self._is_first_of_node = is_first_of_node
        self._options = options
        self._skip_unreadable = skip_unreadable
        self._tiers: list[Tier] = []
        self._leases: list[Lease] = []
        self._writer: CheckpointWriter | None = None
        self._is_closed = False

    def take_leases(self, *, tidies: bool = True) -> None:
        """Open the places, find out which ranks share a node, and take the leases.

        Args:
            tidies: Whether to remove files of earlier runs; once per start, as it may take long.

        Raises:
            CheckpointError: A place can't be used, or another job uses it; all ranks raise it.
        """

        def take(progress: Progress) -> list[Tier]:
            own_memory = self._places.memory_dir
            if self._is_first_of_node and tidies and own_memory is not None:
                for folder in free_memory(spared=own_memory):
                    _log.warning("Freed shared memory in %s, which an old run had left.", folder)
            tiers = self._places.tiers()
            for tier in tiers:
                is_own = tier.is_looked_after_by(
                    self._peers.global_rank, is_first_of_node=self._is_first_of_node
                )
                if is_own and tier.kind is not TierKind.MEMORY:
                    progress.refuse_if_late()
                    self._leases.append(Lease(tier.store, shared=tier.kind is TierKind.REMOTE))
                    self._leases[-1].take()
            return tiers

        # Other ranks wait while one checks whether the owner of a lease is alive, or while storage
        # is slow.
        try:
            taking, answers = self._peers.do(take, lambda _: {"node": self._places.node})
        except BaseException:
            self.leave()
            raise
        self._tiers = taking.result()
        self.node_of_rank = tuple(answer["node"] for answer in answers)

    def recover(self, needs: Sequence[SliceNeed]) -> Recovered | None:
        """Return the newest checkpoint's state; see `checkpoint.recover`."""
        return recover(
            needs,
            self._tiers,
            node=self._places.node,
            peers=self._peers,
            skip_unreadable=self._skip_unreadable,
        )

    def enter(self, recovered: Recovered | None, *, anew: bool = False) -> CheckpointId:
        """Make the writer; return this attempt's id of step 0, see `begin_run`.

        Args:
            recovered: The state from which the ranks go on.
            anew: Whether to begin a new run, whatever the places contain.

        Raises:
            CheckpointError: See `begin_run`.
        """
        start = begin_run(
            self._tiers,
            recovered=recovered,
            node=self._places.node,
            peers=self._peers,
            skip_unreadable=self._skip_unreadable,
            anew=anew,
        )
        if self._is_first_of_node:
            self._places.forget_other_runs(start.run)
        self._writer = CheckpointWriter(
            self._tiers,
            node_of_rank=self.node_of_rank,
            peers=self._peers,
            options=self._options,
        )
        return start

    @property
    def writer(self) -> CheckpointWriter:
        """The writer of this rank's checkpoints.

        Raises:
            OccupiedError: Another job has taken over a place.
        """
        assert self._writer is not None, "this rank has not entered the run"
        for lease in self._leases:
            lease.raise_if_lost()
        return self._writer

    def close(self) -> None:
        """Finish all saves that were started; see `CheckpointWriter.close`."""
        writer, self._is_closed = self.writer, True
        writer.close()

    def leave(self) -> None:
        """Release the leases and give up unfinished writes."""
        if self._writer is not None and not self._is_closed:
            self._writer.leave()
        for lease in self._leases:
            lease.release()


def probe(places: Places, peers: Peers, *, is_first_of_node: bool) -> None:
    """Check that the remote store, if there is one, accepts checkpoints; every rank calls it.

    Communicates.

    Raises:
        CheckpointError: It doesn't; all ranks raise it.
    """

    def ask(_: Progress) -> None:
        if places.path_or_url is not None and is_first_of_node:
            check_store(places.path_or_url, writes=True, **places.storage_options)

    peers.do(ask)


def peers_of(trainer: pl.Trainer, timeout_s: float) -> Peers:
    """Return the ranks of this fit; after losses this rank may be the only one."""
    strategy = run_of(trainer).strategy
    if strategy is None or trainer.world_size == 1:
        return Peers(timeout_s=timeout_s)
    processes = strategy.processes
    store, host = processes.open_store("checkpoints")
    return Peers(
        store,
        global_rank=trainer.global_rank,
        world_size=trainer.world_size,
        timeout_s=timeout_s,
        is_over=processes.comms.is_aborted,
        host=own_host(host),
    )
