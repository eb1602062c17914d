"""How the ranks of a job come together at the places of their checkpoints: all of them, or none."""

import contextlib
import json
from collections import defaultdict
from dataclasses import dataclass

from lightning_hetero.callbacks.places import Places
from lightning_hetero.checkpoint import Tier, TierKind, Transport
from lightning_hetero.checkpoint.lease import Lease
from lightning_hetero.core.errors import CheckpointError, HeteroError

__all__ = ["Joined", "join"]


@dataclass(frozen=True, kw_only=True)
class Joined:
    """One rank's view of the places."""

    tiers: list[Tier]
    node: str
    """Name of this node."""
    node_of_rank: tuple[str, ...]
    leases: tuple[Lease, ...]
    """What this rank holds for all; to be released in the end."""


def join(places: Places, transport: Transport, *, is_first_of_node: bool) -> Joined:
    """Open the places, tell the nodes apart and take the leases; every rank calls it. Communicates.

    Raises:
        CheckpointError: A place can't be used, another job uses it, or machines share what should
            be each one's own; all ranks raise it.
    """
    leases: list[Lease] = []
    tiers: list[Tier] = []
    node = disk = error = ""
    try:
        tiers = places.tiers()
        node, disk = places.identify_node()
        for tier in tiers:
            is_shared = tier.kind is TierKind.REMOTE
            is_own = transport.global_rank == 0 if is_shared else is_first_of_node
            if is_own and tier.kind is not TierKind.MEMORY:
                leases.append(Lease(tier.store, shared=is_shared))
                leases[-1].take()
    except (HeteroError, OSError) as caught:
        error = f"Rank {transport.global_rank}: {caught}"
    except Exception as caught:
        # Stores raise their client library's own types.
        error = f"Rank {transport.global_rank}: {caught!r}"
    message = json.dumps([node, disk, error]).encode()
    answers = [json.loads(data) for data in transport.all_gather(message)]
    with contextlib.ExitStack() as undo:
        for lease in leases:
            undo.callback(lease.release)
        if errors := [text for _, _, text in answers if text]:
            raise CheckpointError(" ".join(errors))
        _refuse_shared_disks([(name, disk) for name, disk, _ in answers])
        undo.pop_all()
    names = tuple(name for name, _, _ in answers)
    return Joined(tiers=tiers, node=node, node_of_rank=names, leases=tuple(leases))


def _refuse_shared_disks(nodes: list[tuple[str, str]]) -> None:
    nodes_of_disk: dict[str, set[str]] = defaultdict(set)
    for node, disk in nodes:
        if disk:
            nodes_of_disk[disk].add(node)
    for sharing in nodes_of_disk.values():
        if len(sharing) > 1:
            raise CheckpointError(
                f"Nodes {sorted(sharing)} share their local_dir, so a copy in it would be lost "
                "with them all. Give each a folder on its own disk; what all nodes reach is "
                "path_or_url."
            )
