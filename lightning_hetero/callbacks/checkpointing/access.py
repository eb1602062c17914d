"""One rank's access to the places where a run keeps checkpoints.

A *lease* of a place is a file there that keeps other jobs from writing to it. Ranks take the leases
of their places before they recover or save.
"""

import logging

import lightning.pytorch as pl

from lightning_hetero.callbacks.checkpointing.places import Places, free_memory
from lightning_hetero.checkpoint import Peers, Tier, TierKind
from lightning_hetero.checkpoint.claims import Lease
from lightning_hetero.checkpoint.serving import own_host
from lightning_hetero.checkpoint.store import check_store
from lightning_hetero.core.process import Progress
from lightning_hetero.strategy.run import run_of

_log = logging.getLogger(__name__)


def take_leases(
    places: Places, peers: Peers, *, is_first_of_node: bool, tidies: bool = True
) -> tuple[list[Tier], list[Lease]]:
    """Take the leases of the places that this rank maintains; return the node's tiers, and those.

    Every rank calls it. Communicates.

    Args:
        places: This node's places.
        peers: All ranks.
        is_first_of_node: Whether this rank maintains its node's places for all ranks of the node.
        tidies: Whether to remove files of earlier runs; once per start, as it may take long.

    Raises:
        CheckpointError: A place can't be used, or another job uses it; all ranks raise it.
    """
    leases: list[Lease] = []

    def take(progress: Progress) -> list[Tier]:
        own_memory = places.memory_dir
        if is_first_of_node and tidies and own_memory is not None:
            for folder in free_memory(spared=own_memory):
                _log.warning("Freed shared memory in %s, which an old run had left.", folder)
        tiers = places.tiers()
        for tier in tiers:
            is_own = tier.is_maintained_by(peers.global_rank, is_first_of_node=is_first_of_node)
            if is_own and tier.kind is not TierKind.MEMORY:
                progress.refuse_if_late()
                leases.append(Lease(tier.store, shared=tier.kind is TierKind.REMOTE))
                leases[-1].take()
        return tiers

    # Other ranks wait while one checks whether the owner of a lease is alive, or while storage is
    # slow.
    try:
        taking, _ = peers.do(take)
    except BaseException:
        for lease in leases:
            lease.release()
        raise
    return taking.result(), leases


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
    if trainer.world_size == 1:
        return Peers(timeout_s=timeout_s)
    processes = run_of(trainer).strategy.processes
    store, host = processes.open_store("checkpoints")
    return Peers(
        store,
        global_rank=trainer.global_rank,
        world_size=trainer.world_size,
        timeout_s=timeout_s,
        is_over=processes.comms.is_aborted,
        host=own_host(host),
    )
