"""How the ranks of a job come together at the places of their checkpoints: all of them, or none."""

import contextlib
from collections import defaultdict
from dataclasses import dataclass

from lightning_hetero.callbacks.places import Places
from lightning_hetero.checkpoint import Tier, TierKind, Transport
from lightning_hetero.checkpoint.claims import Lease
from lightning_hetero.checkpoint.deadlines import Progress
from lightning_hetero.checkpoint.transport import finish_together
from lightning_hetero.core.errors import CheckpointError

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

    def enter(_: Progress) -> tuple[list[Tier], str, str]:
        tiers = places.tiers()
        node, disk = places.identify_node()
        for tier in tiers:
            is_own = tier.is_looked_after_by(
                transport.global_rank, is_first_of_node=is_first_of_node
            )
            if is_own and tier.kind is not TierKind.MEMORY:
                leases.append(Lease(tier.store, shared=tier.kind is TierKind.REMOTE))
                leases[-1].take()
        return tiers, node, disk

    # Who waits to see whether an owner lives, or for a slow place, is waited for.
    entering, answers = finish_together(enter, transport, lambda found: {"names": found[1:]})
    with contextlib.ExitStack() as undo:
        for lease in leases:
            undo.callback(lease.release)
        if errors := [answer["error"] for answer in answers if "error" in answer]:
            raise CheckpointError(" ".join(errors))
        _refuse_shared_disks([(node, disk) for node, disk in (a["names"] for a in answers)])
        undo.pop_all()
    tiers, node, _ = entering.result()
    names = tuple(answer["names"][0] for answer in answers)
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
