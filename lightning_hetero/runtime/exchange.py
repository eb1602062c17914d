"""Pull weights from the owners of slices into the plan, push gradients straight to the owners.

Every message holds all pieces of one unit for one peer (see `core.transfers`), in the propagation
dtype, so a rank moves one stage's worth of bytes each way per iteration, as reduce-scatter and
all-gather do. The owner sums the pipelines' pieces in fp32 and in pipeline order: the result is the
same bit for bit on every run (Hydraulis §5.2; AutoHet's layer-wise synchronisation, §III).

Floor: with D equal pipelines of stage bytes S each rank sends S·(D-1)/D and receives as much, for
push and for pull. Receive buffers take the same memory while the exchange lasts.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.core.transfers import Message, Piece
from lightning_hetero.runtime.weights import ComputeWeights, SliceStore, narrow_rows

__all__ = ["Pull", "Push", "in_units"]


@dataclass(frozen=True)
class _Contribution:
    """A message's gradient pieces, waiting to be summed into the owner's slices."""

    message: Message
    pipeline_index: int
    pieces: Sequence[Tensor]


def in_units(messages: Sequence[Message]) -> dict[int, list[Message]]:
    """Return the messages by unit, units in the order in which they come."""
    units: dict[int, list[Message]] = defaultdict(list)
    for message in messages:
        units[message.unit].append(message)
    return dict(units)


def _split_works(
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


class Pull:
    """Bring the stage's weights up to date: posted at once, waited for unit by unit.

    Called by every rank once per iteration whose weights are stale: `start`, then `wait_unit`
    before a unit computes, then `finish`.
    """

    def __init__(
        self,
        store: SliceStore,
        weights: ComputeWeights,
        *,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
    ) -> None:
        self._store = store
        self._weights = weights
        self._group = group
        self._dtype = dtype
        rank = store.global_rank
        self._all = in_units(weights.table.pull(rank))
        self._trainable = in_units(weights.table.pull(rank, trainable_only=True))
        self._arrivals: dict[int, list[tuple[Message, Tensor]]] = {}
        self._works: dict[int, list[dist.Work]] = {}
        self._sent: list[tuple[list[dist.Work], list[Tensor]]] = []

    def start(self, *, trainable_only: bool) -> None:
        """Post every message of this rank, units ascending, and make the local copies."""
        for unit, messages in (self._trainable if trainable_only else self._all).items():
            operations, arrivals = [], []
            packed: dict[object, Tensor] = {}
            for message in messages:
                if message.source == message.destination:
                    self._copy(message)
                elif message.source == self._store.global_rank:
                    buffer = packed.get(message.pieces)
                    if buffer is None:
                        buffer = packed[message.pieces] = self._pack(message)
                    operations.append(
                        dist.P2POp(dist.isend, buffer, message.destination, self._group)
                    )
                else:
                    buffer = self._buffer(message)
                    arrivals.append((message, buffer))
                    operations.append(dist.P2POp(dist.irecv, buffer, message.source, self._group))
            if operations:
                receives, sends = _split_works(operations, dist.batch_isend_irecv(operations))
                self._sent.append((sends, list(packed.values())))
                if arrivals:
                    self._works[unit] = receives
                    self._arrivals[unit] = arrivals

    def wait_unit(self, unit: int) -> None:
        """Wait until a unit's weights are here; returns at once if they are already."""
        works = self._works.pop(unit, None)
        if works is None:
            return
        for work in works:
            work.wait()
        for message, buffer in self._arrivals.pop(unit):
            self._unpack(message, buffer)

    def finish(self) -> None:
        """Wait for everything that is left, also for what other ranks fetch from here."""
        for unit in tuple(self._works):
            self.wait_unit(unit)
        for works, _ in self._sent:
            for work in works:
                work.wait()
        self._sent.clear()

    def _buffer(self, message: Message) -> Tensor:
        numel = self._weights.table.numel(message)
        return torch.empty(numel, dtype=self._dtype, device=self._store.device)

    def _own_rows(self, parameter: str, start: int, stop: int) -> Tensor:
        first, _ = self._store.intervals[parameter]
        master = self._store.masters[parameter].detach()
        return narrow_rows(master, self._store.specs[parameter], start - first, stop - first)

    def _pack(self, message: Message) -> Tensor:
        rows = [self._own_rows(p.parameter, p.start, p.stop) for p in message.pieces]
        return torch.cat([row.to(self._dtype).reshape(-1) for row in rows])

    def _copy(self, message: Message) -> None:
        for piece in message.pieces:
            if piece.parameter not in self._weights.shared:
                own = self._own_rows(piece.parameter, piece.start, piece.stop)
                self._weights.rows(piece.parameter, piece.start, piece.stop).copy_(own)

    def _unpack(self, message: Message, buffer: Tensor) -> None:
        offset = 0
        for piece in message.pieces:
            rows = self._weights.rows(piece.parameter, piece.start, piece.stop)
            rows.copy_(buffer[offset : offset + rows.numel()].view(rows.shape))
            offset += rows.numel()


class Push:
    """Send gradients to the owners of slices, a unit as soon as its last backward has ended.

    Called by every rank once per iteration: `start`, `unit_ready` from the backward, `finish`.
    Units leave in one global order, descending, whatever the order in which they become ready.
    """

    def __init__(
        self,
        store: SliceStore,
        weights: ComputeWeights,
        *,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        reduce_shards: Callable[[int], None] | None = None,
    ) -> None:
        self._store = store
        self._weights = weights
        self._group = group
        self._dtype = dtype
        self._reduce_shards = reduce_shards
        self._units = in_units(weights.table.push(store.global_rank))
        self._pipelines = {
            (name, holding.global_rank): holding.pipeline_index
            for name in store.specs
            for holding in weights.table.holdings(name)
        }
        self._trainable_of_unit: dict[int, set[str]] = {
            unit: {
                piece.parameter
                for message in messages
                if message.source == store.global_rank
                for piece in message.pieces
            }
            for unit, messages in self._units.items()
        }
        self._waiting: list[int] = []
        self._ready: set[int] = set()
        self._works: list[dist.Work] = []
        self._sent: list[Tensor] = []
        self._contributions: list[_Contribution] = []

    @property
    def names_by_unit(self) -> dict[int, set[str]]:
        """The parameters of each unit whose gradients this rank sends or copies."""
        return self._trainable_of_unit

    def start(self) -> None:
        """Begin an iteration's push; units of which this rank computes nothing are ready."""
        self._waiting = list(self._units)
        self._ready = {unit for unit, names in self._trainable_of_unit.items() if not names}

    def unit_ready(self, unit: int) -> None:
        """Say that a unit's gradients are final here; posts whatever can go now, in order."""
        self._ready.add(unit)
        while self._waiting and self._waiting[0] in self._ready:
            self._post(self._waiting.pop(0))

    def finish(self) -> dict[str, Tensor]:
        """Post what is left, wait, and return the summed gradient of each slice with rows."""
        self._ready.update(self._waiting)
        while self._waiting:
            self._post(self._waiting.pop(0))
        for work in self._works:
            work.wait()
        gradients = self._sum()
        self._works.clear()
        self._sent.clear()
        self._contributions.clear()
        return gradients

    def missing(self) -> list[str]:
        """Return the parameters for which this rank's backward made no gradient."""
        return sorted(
            name
            for name, shard in self._weights.shards.items()
            if shard.requires_grad and shard.grad is None
        )

    def _post(self, unit: int) -> None:
        if self._reduce_shards is not None:
            self._reduce_shards(unit)
        operations = []
        for message in self._units[unit]:
            rank = self._store.global_rank
            if message.source == rank == message.destination:
                self._contribute(message, self._gradient_rows(message))
            elif message.source == rank:
                rows = self._gradient_rows(message)
                buffer = torch.cat([row.to(self._dtype).reshape(-1) for row in rows])
                self._sent.append(buffer)
                operations.append(dist.P2POp(dist.isend, buffer, message.destination, self._group))
            else:
                buffer = torch.empty(
                    self._weights.table.numel(message),
                    dtype=self._dtype,
                    device=self._store.device,
                )
                self._contribute(message, self._split(message, buffer))
                operations.append(dist.P2POp(dist.irecv, buffer, message.source, self._group))
        if operations:
            self._works += dist.batch_isend_irecv(operations)

    def _gradient_rows(self, message: Message) -> list[Tensor]:
        rows = []
        for piece in message.pieces:
            shard = self._weights.shards[piece.parameter]
            gradient = torch.zeros_like(shard) if shard.grad is None else shard.grad
            rows.append(self._weights.rows(piece.parameter, piece.start, piece.stop, gradient))
        return rows

    def _split(self, message: Message, buffer: Tensor) -> list[Tensor]:
        sizes = [
            (piece.stop - piece.start) * self._store.specs[piece.parameter].row_numel
            for piece in message.pieces
        ]
        return list(torch.split(buffer, sizes))

    def _contribute(self, message: Message, pieces: Sequence[Tensor]) -> None:
        pipeline_index = self._pipelines[message.pieces[0].parameter, message.source]
        self._contributions.append(_Contribution(message, pipeline_index, pieces))

    def _sum(self) -> dict[str, Tensor]:
        """Sum contributions in fp32 (or the master's dtype) in order of pipeline, then rank."""
        gradients: dict[str, Tensor] = {}
        self._contributions.sort(key=lambda item: (item.pipeline_index, item.message.source))
        for contribution in self._contributions:
            for piece, values in zip(contribution.message.pieces, contribution.pieces, strict=True):
                total = gradients.get(piece.parameter)
                if total is None:
                    gradients[piece.parameter] = self._first(piece, values)
                    continue
                rows = self._rows_of(total, piece)
                rows += values.reshape(rows.shape)
        return gradients

    def _first(self, piece: Piece, values: Tensor) -> Tensor:
        """Return a slice's gradient that holds its first contribution.

        Buffers and gradients of this iteration are nobody else's, so a contribution of the whole
        slice becomes the sum itself where its dtype allows.
        """
        master = self._store.masters[piece.parameter]
        if (piece.start, piece.stop) == self._store.intervals[piece.parameter]:
            return values.detach().reshape(master.shape).to(master.dtype)
        total = torch.zeros_like(master, memory_format=torch.contiguous_format)
        self._rows_of(total, piece).copy_(values.reshape(self._rows_of(total, piece).shape))
        return total

    def _rows_of(self, total: Tensor, piece: Piece) -> Tensor:
        first, _ = self._store.intervals[piece.parameter]
        spec = self._store.specs[piece.parameter]
        return narrow_rows(total, spec, piece.start - first, piece.stop - first)
