"""Briefly measure suspected devices and links, between two steps.

Greyhound's validation: one matrix product per device, and one message back and forth for each pair
of a round.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_hetero.straggler.events import Pair, normalise_pair


def probe_device(
    device: torch.device,
    *,
    size: int = 1024,
    within: AbstractContextManager[Any] | None = None,
) -> float:
    """Return the median seconds of a `size`³ matrix product, in bf16 on CUDA; doesn't communicate.

    Args:
        device: The device.
        size: Rows and columns of the matrices.
        within: A context for each product that emulates the device's speed.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left = torch.ones(size, size, device=device, dtype=dtype)
    multiply = partial(torch.mm, left, left, out=torch.empty_like(left))
    return statistics.median(_repeat_s(multiply, device=device, repeats=5, within=within))


def probe_memory(
    device: torch.device,
    *,
    num_bytes: int = 2**26,
    within: AbstractContextManager[Any] | None = None,
) -> float:
    """Return the median seconds of a copy inside a device's memory; doesn't communicate."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    copy = partial(torch.empty_like(source).copy_, source)
    return statistics.median(_repeat_s(copy, device=device, repeats=5, within=within))


def probe_links(
    rounds: Sequence[Sequence[Pair]],
    device: torch.device,
    *,
    num_bytes: int = 16 * 2**20,
    repeats: int = 3,
    wait_for: Callable[..., object] | None = None,
) -> dict[Pair, float]:
    """Return the shortest time of a message back and forth, in seconds, for every pair.

    The shortest, because a slow link slows every message, and a busy host only some. All ranks call
    it with the same rounds. Pairs of one round run at the same time; barriers separate the rounds.

    Args:
        rounds: Disjoint pairs of global ranks, as `rounds_of` gives them.
        device: The device that has the messages.
        num_bytes: Size of a message (Greyhound: 16 to 64 MiB).
        repeats: Messages per pair, after one to warm up.
        wait_for: Waits for a message, given its work, `peer` and `num_bytes`, as the runtime's
            clock does; None waits without recording.
    """
    own = dist.get_rank()
    payload = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    times_s: dict[Pair, float] = {}

    def exchange(peer: int) -> None:
        # Send before receive on one side only: two that both receive first would deadlock.
        if own < peer:
            dist.send(payload, peer)
        work = dist.irecv(payload, peer)
        assert work is not None
        if wait_for is None:
            work.wait()
        else:
            wait_for(work, peer=peer, num_bytes=num_bytes)
        if own > peer:
            dist.send(payload, peer)

    for pairs in rounds:
        dist.barrier()
        for low, high in (normalise_pair(*pair) for pair in pairs if own in pair):
            peer = high if own == low else low
            seconds = _repeat_s(partial(exchange, peer), device=device, repeats=repeats)
            if own == low:
                times_s[low, high] = min(seconds)
    everyone: list[dict[Pair, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, times_s)
    return {pair: seconds for part in everyone for pair, seconds in part.items()}


def _repeat_s(
    action: Callable[[], object],
    *,
    device: torch.device,
    repeats: int,
    within: AbstractContextManager[Any] | None = None,
) -> list[float]:
    """Return the seconds of each repeat, after one to warm up."""
    times_s = []
    for repeat in range(repeats + 1):
        _synchronize(device)
        start_s = time.perf_counter()
        with within or nullcontext():
            action()
        _synchronize(device)
        if repeat:
            times_s.append(time.perf_counter() - start_s)
    return times_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
