"""Measure how long messages between two neighbouring stages take, by messages there and back."""

import time

import torch
import torch.distributed as dist

from lightning_hetero.core.plan import RankPlace
from lightning_hetero.runtime.stage.activations import ActivationLink
from lightning_hetero.schedules import Edge

__all__ = ["measure_edge"]

_NUM_MEASURED = 3
"""Round trips of each size, of which the shortest counts."""


def measure_edge(link: ActivationLink, place: RankPlace) -> Edge:
    """Return the link to the next stage for messages like the last; collective in a pipeline.

    The first ranks of neighbouring stages take part; others return an edge without delay. The links
    behind stages of even index come first, so that no stage waits for more than one neighbour.
    """
    found = Edge()
    turns = (True, False) if place.stage_index % 2 == 0 else (False, True)
    for is_forward in turns if place.tp_rank == 0 else ():
        if is_forward and link.following is not None:
            peer, sizes = link.following.sent[0].receiver, (1, link.num_sent_bytes)
            latency_s, whole_s = (
                min(_round_trip_s(link, peer, size) for _ in range(_NUM_MEASURED)) / 2
                for size in sizes
            )
            found = Edge(latency_s=latency_s, transfer_s=max(0.0, whole_s - latency_s))
        elif not is_forward and link.previous is not None:
            peer, own = link.previous.received.sender, link.comms.global_rank
            there, back = link.comms.edge(peer, own), link.comms.edge(own, peer)
            for size in (1, link.num_received_bytes):
                message = torch.empty(max(size, 1), dtype=torch.uint8, device=link.device)
                for _ in range(_NUM_MEASURED):
                    _wait(dist.irecv(message, peer, group=there), message)
                    _wait(dist.isend(message, peer, group=back), message)
    return found


def _round_trip_s(link: ActivationLink, peer: int, size: int) -> float:
    own = link.comms.global_rank
    message = torch.empty(max(size, 1), dtype=torch.uint8, device=link.device)
    answer = torch.empty_like(message)
    expected = dist.irecv(answer, peer, group=link.comms.edge(peer, own))
    start = time.perf_counter()
    _wait(dist.isend(message, peer, group=link.comms.edge(own, peer)), message)
    _wait(expected, answer)
    return time.perf_counter() - start


def _wait(work: dist.Work | None, message: torch.Tensor) -> None:
    """Wait on the host until a message has left or arrived."""
    assert work is not None
    work.wait()
    if message.is_cuda:
        torch.cuda.current_stream(message.device).synchronize()
