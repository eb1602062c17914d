"""Briefly measure suspected devices and links, at a step boundary.

Greyhound's validation: one matrix product per device, one message there and back per pair of a
round. All ranks call `probe_devices` and `probe_links` together; these communicate.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_hetero.straggler.events import Pair, normalise_pair

__all__ = ["probe_device", "probe_devices", "probe_links", "probe_memory"]

_Key = TypeVar("_Key")


def probe_device(
    device: torch.device,
    *,
    size: int = 1024,
    repeats: int = 5,
    within: AbstractContextManager[Any] | None = None,
) -> float:
    """Return the median seconds of a `size`³ matrix product, in bf16 on CUDA; doesn't communicate.

    Args:
        device: The device.
        size: Rows and columns of the matrices.
        repeats: Products, after one to warm up.
        within: A context for each product that emulates the device's speed.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left = torch.ones(size, size, device=device, dtype=dtype)
    out = torch.empty_like(left)
    around = nullcontext() if within is None else within

    def multiply() -> None:
        with around:
            torch.mm(left, left, out=out)

    return statistics.median(_repeat_s(multiply, device=device, repeats=repeats))


def probe_devices(
    device: torch.device,
    *,
    size: int = 1024,
    repeats: int = 5,
    within: AbstractContextManager[Any] | None = None,
) -> dict[int, float]:
    """Return every rank's matmul probe, seconds, by global rank. All ranks call it."""
    own_s = probe_device(device, size=size, repeats=repeats, within=within)
    return _gather({dist.get_rank(): own_s})


def probe_memory(
    device: torch.device,
    *,
    num_bytes: int = 2**26,
    repeats: int = 5,
    within: AbstractContextManager[Any] | None = None,
) -> float:
    """Return the median seconds of a copy inside a device's memory; doesn't communicate."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    around = nullcontext() if within is None else within

    def copy() -> None:
        with around:
            target.copy_(source)

    return statistics.median(_repeat_s(copy, device=device, repeats=repeats))


def probe_links(
    rounds: Sequence[Sequence[Pair]],
    device: torch.device,
    *,
    num_bytes: int = 16 * 2**20,
    repeats: int = 3,
    wait_for: Callable[[dist.Work, int, int], None] | None = None,
) -> dict[Pair, float]:
    """Return the shortest time of a message there and back, seconds, for every pair.

    The shortest, because a slow link slows every message, and a busy host only some.

    All ranks call it with the same rounds. Pairs of one round run at the same time; barriers
    separate the rounds.

    Args:
        rounds: Disjoint pairs of global ranks, as `ring_rounds` gives them.
        device: Where the messages lie.
        num_bytes: Size of a message (Greyhound: 16 to 64 MiB).
        repeats: Messages per pair, after one to warm up.
        wait_for: Waits for a message, given its work, sender and bytes, as the runtime does; None
            just waits.
    """
    own = dist.get_rank()
    wait = wait_for or (lambda work, *_: work.wait())
    payload = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    times_s: dict[Pair, float] = {}
    for pairs in rounds:
        dist.barrier()
        for rank_a, rank_b in pairs:
            if own not in (rank_a, rank_b):
                continue
            pair = normalise_pair(rank_a, rank_b)
            peer, first = (pair[1], True) if own == pair[0] else (pair[0], False)
            seconds = min(
                _repeat_s(
                    lambda peer=peer, first=first: _ping_pong(  # type: ignore[misc]
                        payload, peer, wait, sends_first=first
                    ),
                    device=device,
                    repeats=repeats,
                )
            )
            if first:
                times_s[pair] = seconds
    return _gather(times_s)


def _ping_pong(
    payload: torch.Tensor,
    peer: int,
    wait_for: Callable[[dist.Work, int, int], None],
    *,
    sends_first: bool,
) -> None:
    def receive() -> None:
        work = dist.irecv(payload, peer)
        assert work is not None
        wait_for(work, peer, payload.nbytes)

    # Send before receive on one side only: two peers that both receive first would deadlock.
    if sends_first:
        dist.send(payload, peer)
        receive()
    else:
        receive()
        dist.send(payload, peer)


def _repeat_s(action: Callable[[], object], *, device: torch.device, repeats: int) -> list[float]:
    """Return the seconds of each repeat, after one to warm up."""
    times_s = []
    for repeat in range(repeats + 1):
        _synchronize(device)
        start_s = time.perf_counter()
        action()
        _synchronize(device)
        if repeat:
            times_s.append(time.perf_counter() - start_s)
    return times_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gather(own: dict[_Key, float]) -> dict[_Key, float]:
    everyone: list[dict[_Key, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return {key: seconds for part in everyone for key, seconds in part.items()}
