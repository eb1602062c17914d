"""Parts that pull and push share: how a unit travels, the stream that packs, waiting for messages.

All pieces of one unit travel together (see `core.transfers`), in the compute dtype, so a rank moves
one stage's worth of bytes each way per iteration, as reduce-scatter and all-gather do (Hydraulis
§5.2; AutoHet's layer-wise synchronisation, §III).

Floor: with D equal pipelines of stage bytes S each rank sends S·(D-1)/D and receives as much, for
push and for pull. Receive buffers take the same memory while the exchange lasts.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.core.transfers import ExchangeKind
from lightning_hetero.runtime.clock import ComputeClock

__all__ = [
    "ExchangeOptions",
    "SideStream",
    "Sums",
    "TwoLegged",
    "has_streams",
    "split_works",
    "wait_for_all",
]


_SAME_STREAM = nullcontext()


def has_streams(device: torch.device) -> bool:
    """Whether a device runs what it is given on several streams."""
    return device.type == "cuda"


class SideStream:
    """A stream beside the computation's on CUDA; the calling thread elsewhere.

    Buffers made in `after_compute` may be read by the computation after `join`, and let go then,
    without `record_stream`: what takes their memory next is made in a later `after_compute`, after
    all that the computation had been given until then. What is sent is kept until its work has been
    waited for.

    Args:
        device: The rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if has_streams(device):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def after_compute(self) -> AbstractContextManager[Any]:
        """Enqueue inside this context, after everything that the current stream has been given."""
        if self._stream is None:
            return _SAME_STREAM
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """Return the end of what has been enqueued here so far."""
        return None if self._stream is None else self._stream.record_event()

    def join(self, mark: torch.cuda.Event | None) -> None:
        """Let the current stream wait for a mark; the host doesn't wait."""
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """How a plan's pull and push run."""

    group: dist.ProcessGroup | None
    """The communicator of messages; None with one rank."""
    group_of: Callable[[tuple[int, ...]], dist.ProcessGroup | None]
    """Returns the communicator of the collectives of some ranks, ascending; None if there is none,
    and what they exchange goes by messages."""
    kind: ExchangeKind
    """How units travel."""
    node_of_rank: Sequence[int]
    """By global rank; read where gradients are summed by node."""
    dtype: torch.dtype
    """Dtype of what travels, in which stages compute."""
    clock: ComputeClock
    """Times the waits."""
    side_stream: SideStream
    """Where messages are packed."""


class TwoLegged:
    """A unit that is posted twice, the second time with what has come."""

    def go_on(self) -> None:
        """Post the second leg, after the first; called in the same order of legs on all ranks.

        The host waits for the first one where there are no streams.
        """
        raise NotImplementedError


class Sums(NamedTuple):
    """The summed gradients of slices."""

    by_name: dict[str, Tensor]
    memory: list[Tensor]
    """Tensors that have all their elements, each once; fewer where many lie in one."""

    @classmethod
    def of(cls, by_name: dict[str, Tensor]) -> Self:
        """Return sums that each have memory of their own."""
        return cls(by_name, [*by_name.values()])


def split_works(
    operations: Sequence[dist.P2POp], works: list[dist.Work]
) -> tuple[list[dist.Work], list[dist.Work]]:
    """Return (works of receives, works of sends); one work for all if the backend coalesces."""
    if len(works) != len(operations):
        return works, works
    pairs = list(zip(operations, works, strict=True))
    return (
        [work for operation, work in pairs if operation.op is dist.irecv],
        [work for operation, work in pairs if operation.op is dist.isend],
    )


def wait_for_all(
    clock: ComputeClock, works: Sequence[dist.Work], senders: Sequence[tuple[int, int]]
) -> None:
    """Wait for one message of each (peer, bytes); any may have been late if they coalesced."""
    if len(works) != len(senders):
        clock.wait_together(works, senders, is_exchange=True)
        return
    for work, (peer, num_bytes) in zip(works, senders, strict=True):
        clock.wait_for(work, peer=peer, num_bytes=num_bytes, is_exchange=True)
