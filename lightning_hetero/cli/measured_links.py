"""Measure messages inside a node and between nodes, where `profile` runs on several ranks.

Each kind of link is measured on the first two ranks that have it, one pair at a time. A small and a
large message go there and back; what the large one takes longer is its bytes, the rest latency.
"""

import os
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_hetero.core.profile import LinkTimes
from lightning_hetero.straggler.locate import Pair
from lightning_hetero.straggler.probe import probe_links

__all__ = ["MeasuredLinks", "measure_links"]

_SMALL_BYTES = 1024
_LARGE_BYTES = 8 * 2**20


@dataclass(frozen=True, kw_only=True)
class MeasuredLinks:
    """Measured links, None where no two ranks stand so."""

    inside_node: LinkTimes | None = None
    between_nodes: LinkTimes | None = None


def measure_links(
    device: torch.device,
    *,
    node: str | None = None,
    num_bytes: tuple[int, int] = (_SMALL_BYTES, _LARGE_BYTES),
    repeats: int = 5,
) -> MeasuredLinks:
    """Return what messages take; collective over all ranks of the default process group.

    Args:
        device: Where this rank's messages lie.
        node: Name of this rank's node, if it plays one.
        num_bytes: Sizes of the small and of the large message.
        repeats: Messages of each size and pair, of which the quickest counts.
    """
    own = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"
    nodes: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(nodes, node or own)
    inside, between = _first_pair(nodes, same=True), _first_pair(nodes, same=False)
    rounds = [[pair] for pair in (inside, between) if pair is not None]
    small, large = (
        probe_links(rounds, device, num_bytes=size, repeats=repeats) for size in num_bytes
    )

    def times(pair: Pair | None) -> LinkTimes | None:
        if pair is None:
            return None
        # Under noise a large message may look as quick as a small one.
        longer_s = max(large[pair] - small[pair], 0.01 * large[pair])
        return LinkTimes(
            bytes_per_s=2 * (num_bytes[1] - num_bytes[0]) / longer_s, latency_s=small[pair] / 2
        )

    return MeasuredLinks(inside_node=times(inside), between_nodes=times(between))


def _first_pair(nodes: list[str], *, same: bool) -> Pair | None:
    """Return the first two ranks on one node, or on two."""
    pairs = ((a, b) for b in range(len(nodes)) for a in range(b))
    return next((pair for pair in pairs if (nodes[pair[0]] == nodes[pair[1]]) == same), None)
