"""Options of pull and push, the stream on which messages are packed, and waiting for messages.

All pieces of one unit travel together (see `exchange.transfers`), in the compute dtype, so a rank
moves one stage's worth of bytes each way per iteration, as reduce-scatter and all-gather do
(Hydraulis §5.2; AutoHet's layer-wise synchronisation, §III).

With D equal pipelines and S bytes in a stage, each rank sends S·(D-1)/D bytes and receives as many,
in push and in pull; no exchange can move fewer. Receive buffers take the same memory meanwhile.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.exchange.transfers import ExchangeKind
from lightning_hetero.runtime.clock import ComputeClock

_SAME_STREAM = nullcontext()


def has_streams(device: torch.device) -> bool:
    """Whether a device runs work on several streams."""
    return device.type == "cuda"


class SideStream:
    """On CUDA a second stream beside that of the computation; elsewhere nothing.

    After `join` the computation may read buffers that were made in `after_compute`. They may be
    freed without `record_stream`: their memory is used again only in a later `after_compute`, which
    first waits for all work that the computation's stream had until then. Buffers that are sent are
    kept until the send has been waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if has_streams(device):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def after_compute(self) -> AbstractContextManager[Any]:
        """Return a context whose work runs after all work that the current stream has now."""
        if self._stream is None:
            return _SAME_STREAM
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """Return an event at the end of all work that this stream has now; None elsewhere."""
        return None if self._stream is None else self._stream.record_event()

    def join(self, mark: torch.cuda.Event | None) -> None:
        """Let the current stream wait for what `mark` returned; the host doesn't wait."""
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """How a plan's pull and push run."""

    group: dist.ProcessGroup | None
    """The communicator of messages; None with one rank."""
    group_of: Callable[[tuple[int, ...]], dist.ProcessGroup | None]
    """Returns the communicator for collectives of some ranks, given ascending; None if they have
    none, and use messages."""
    kind: ExchangeKind
    """How units travel."""
    node_of_rank: Sequence[int]
    """For each global rank the first rank on its node; used if gradients are summed by node."""
    dtype: torch.dtype
    """The compute dtype, in which weights and gradients travel."""
    clock: ComputeClock
    """Times the waits."""
    side_stream: SideStream
    """Where messages are packed."""


def sum_dtype(masters: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype in which gradients are summed: fp32, or the masters' dtype if wider."""
    return reduce(torch.promote_types, (master.dtype for master in masters), torch.float32)


def split_works(
    operations: Sequence[dist.P2POp], works: list[dist.Work]
) -> tuple[list[dist.Work], list[dist.Work]]:
    """Return (works of receives, works of sends); each is all works if the backend merges them."""
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
    """Wait for a message from each (peer, bytes); for all at once if the backend merges works."""
    if len(works) != len(senders):
        clock.wait_together(works, senders, is_exchange=True)
        return
    for work, (peer, num_bytes) in zip(works, senders, strict=True):
        clock.wait_for(work, peer=peer, num_bytes=num_bytes, is_exchange=True)
