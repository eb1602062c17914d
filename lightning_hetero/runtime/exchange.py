"""Pull weights from the owners of slices into the plan, push gradients straight to the owners.

Every message holds all pieces of one unit for one peer (see `core.transfers`), in the propagation
dtype, so a rank moves one stage's worth of bytes each way per iteration, as reduce-scatter and
all-gather do. The owner sums the pipelines' pieces in fp32 and in pipeline order: the result is the
same bit for bit on every run (Hydraulis §5.2; AutoHet's layer-wise synchronisation, §III).

Both overlap with the computation. All of a pull is posted before the first layer runs, and a layer
waits for its own weights only; a layer's push is posted inside the last backward, as soon as that
has left the layer. A `torch.profiler` trace shows the ranges "pull.post", "pull.wait" and
"push.post" with their units, and "push.wait".

Floor: with D equal pipelines of stage bytes S each rank sends S·(D-1)/D and receives as much, for
push and for pull. Receive buffers take the same memory while the exchange lasts.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.core.transfers import Message, Piece
from lightning_hetero.runtime.clock import ComputeClock
from lightning_hetero.runtime.side_stream import SideStream
from lightning_hetero.runtime.trace import traced
from lightning_hetero.runtime.weights import ComputeWeights, SliceStore, narrow_rows

__all__ = ["ExchangeOptions", "Pull", "Push", "in_units"]


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """How a plan's pull and push run."""

    group: dist.ProcessGroup | None
    """The communicator; None with one rank."""
    dtype: torch.dtype
    """Dtype of what travels, that of the propagation."""
    clock: ComputeClock
    """Times the waits."""
    side_stream: SideStream
    """Where messages are packed."""


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


def _wait_for_all(
    clock: ComputeClock, works: Sequence[dist.Work], senders: Sequence[tuple[int, int]]
) -> None:
    """Wait for one message of each (peer, bytes); who was late can't be told if they coalesced."""
    if len(works) != len(senders):
        for work in works:
            work.wait()
        return
    for work, (peer, num_bytes) in zip(works, senders, strict=True):
        clock.wait_for(work, peer=peer, num_bytes=num_bytes, is_exchange=True)


@dataclass
class _Sending:
    """What leaves this rank for one or more peers in one message each."""

    peers: list[int]
    rows: list[Tensor]


@dataclass(frozen=True)
class _Receiving:
    """What arrives from one peer, and where it goes."""

    peer: int
    numel: int
    targets: list[Tensor]


@dataclass
class _PullUnit:
    """One unit's part in every pull: views into slices and compute weights, made once."""

    sending: dict[tuple[Piece, ...], _Sending]
    receiving: list[_Receiving]
    copies: list[tuple[Tensor, Tensor]]
    """(target, source) of what is owned and held here."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do, as slices and compute weights share their memory."""
        return not (self.sending or self.receiving or self.copies)


class Pull:
    """Bring the stage's weights up to date: posted at once, waited for unit by unit.

    Called by every rank once per iteration whose weights are stale: `start`, then `wait_unit`
    before a unit computes, then `finish`.
    """

    def __init__(
        self,
        store: SliceStore,
        weights: ComputeWeights,
        options: ExchangeOptions,
    ) -> None:
        self._store = store
        self._weights = weights
        self._options = options
        rank = store.global_rank
        self._all = self._prepare(weights.table.pull(rank))
        self._trainable = self._prepare(weights.table.pull(rank, trainable_only=True))
        self._arriving: dict[int, tuple[list[dist.Work], list[tuple[_Receiving, Tensor]]]] = {}
        self._posted: dict[int, torch.cuda.Event | None] = {}
        """Units under way; on CUDA, the end of their packing and local copies."""
        self._sent: list[tuple[list[dist.Work], list[Tensor]]] = []

    def _prepare(self, messages: Sequence[Message]) -> dict[int, _PullUnit]:
        units = {}
        for unit, items in in_units(messages).items():
            prepared = units[unit] = _PullUnit({}, [], [])
            for message in items:
                self._prepare_message(prepared, message)
        return {unit: prepared for unit, prepared in units.items() if not prepared.is_empty}

    def _prepare_message(self, unit: _PullUnit, message: Message) -> None:
        rank, rows = self._store.global_rank, self._weights.rows
        if message.source == rank == message.destination:
            for piece in message.pieces:
                if piece.parameter not in self._weights.shared:
                    target = rows(piece.parameter, piece.start, piece.stop)
                    unit.copies.append((target, self._own_rows(piece)))
        elif message.source == rank:
            # Peers that need the same pieces share one buffer.
            own = [self._own_rows(piece) for piece in message.pieces]
            sending = unit.sending.setdefault(message.pieces, _Sending([], own))
            sending.peers.append(message.destination)
        else:
            targets = [rows(piece.parameter, piece.start, piece.stop) for piece in message.pieces]
            numel = sum(target.numel() for target in targets)
            unit.receiving.append(_Receiving(message.source, numel, targets))

    def _own_rows(self, piece: Piece) -> Tensor:
        first, _ = self._store.intervals[piece.parameter]
        master = self._store.masters[piece.parameter].detach()
        spec = self._store.specs[piece.parameter]
        return narrow_rows(master, spec, piece.start - first, piece.stop - first)

    def start(self, *, trainable_only: bool) -> None:
        """Post every message of this rank, units ascending, and make the local copies."""
        self._weights.take_back()
        with self._options.side_stream.behind_compute():
            for index, unit in (self._trainable if trainable_only else self._all).items():
                with traced(f"pull.post {index}"):
                    self._post(index, unit)
                self._posted[index] = self._options.side_stream.mark()

    def _post(self, index: int, unit: _PullUnit) -> None:
        operations, arrivals, buffers = [], [], []
        for target, source in unit.copies:
            target.copy_(source)
        for sending in unit.sending.values():
            buffer = _pack(sending.rows, self._options.dtype)
            buffers.append(buffer)
            for peer in sending.peers:
                operations.append(dist.P2POp(dist.isend, buffer, peer, self._options.group))
        for receiving in unit.receiving:
            buffer = torch.empty(
                receiving.numel, dtype=self._options.dtype, device=self._store.device
            )
            arrivals.append((receiving, buffer))
            operations.append(dist.P2POp(dist.irecv, buffer, receiving.peer, self._options.group))
        if operations:
            receives, sends = _split_works(operations, dist.batch_isend_irecv(operations))
            self._sent.append((sends, buffers))
            if arrivals:
                self._arriving[index] = receives, arrivals

    def wait_unit(self, unit: int) -> None:
        """Wait until a unit's weights are here; returns at once if they are already."""
        if unit not in self._posted:
            return
        self._options.side_stream.join(self._posted.pop(unit))
        if unit in self._arriving:
            with traced(f"pull.wait {unit}"):
                self._unpack(*self._arriving.pop(unit))

    def _unpack(
        self, works: Sequence[dist.Work], arrivals: Sequence[tuple[_Receiving, Tensor]]
    ) -> None:
        senders = [(receiving.peer, buffer.nbytes) for receiving, buffer in arrivals]
        _wait_for_all(self._options.clock, works, senders)
        for receiving, buffer in arrivals:
            parts = torch.split(buffer, [target.numel() for target in receiving.targets])
            for target, part in zip(receiving.targets, parts, strict=True):
                target.copy_(part.view(target.shape))

    def finish(self) -> None:
        """Wait for everything that is left, also for what other ranks fetch from here."""
        for unit in tuple(self._posted):
            self.wait_unit(unit)
        for works, _ in self._sent:
            for work in works:
                work.wait()
        self._sent.clear()


def _pack(rows: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return rows end to end in one new buffer."""
    return torch.cat([row.to(dtype).reshape(-1) for row in rows])


class Push:
    """Send gradients to the owners of slices, a unit as soon as its last backward has ended.

    Called by every rank once per iteration: `start`, `unit_ready` from the backward, `finish`.
    Units leave in one global order, descending, whatever the order in which they become ready.
    """

    def __init__(
        self,
        store: SliceStore,
        weights: ComputeWeights,
        options: ExchangeOptions,
    ) -> None:
        self._store = store
        self._weights = weights
        self._options = options
        messages = weights.table.push(store.global_rank)
        self._local = [item for item in messages if item.source == item.destination]
        self._units = in_units([item for item in messages if item.source != item.destination])
        self._pipelines = {
            (name, holding.global_rank): holding.pipeline_index
            for name in store.specs
            for holding in weights.table.holdings(name)
        }
        self.sent_by_unit: dict[int, set[str]] = {
            unit: {
                piece.parameter
                for message in messages
                if message.source == store.global_rank
                for piece in message.pieces
            }
            for unit, messages in self._units.items()
        }
        """The parameters of each unit whose gradients leave this rank."""
        self._waiting: list[int] = []
        self._ready: set[int] = set()
        self._arriving: list[tuple[list[dist.Work], list[tuple[int, int]]]] = []
        self._works: list[dist.Work] = []
        self._sent: list[Tensor] = []
        self._contributions: list[_Contribution] = []

    def start(self) -> None:
        """Begin an iteration's push; units of which this rank sends nothing are ready."""
        self._waiting = list(self._units)
        self._ready = {unit for unit, names in self.sent_by_unit.items() if not names}

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
        with traced("push.wait"):
            for works, senders in self._arriving:
                _wait_for_all(self._options.clock, works, senders)
            for work in self._works:
                work.wait()
            self._options.side_stream.join(self._options.side_stream.mark())
        for message in self._local:
            self._contribute(message, self._gradient_rows(message))
        gradients = self._sum()
        self._arriving.clear()
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
        with traced(f"push.post {unit}"), self._options.side_stream.behind_compute():
            self._post_messages(self._units[unit])

    def _post_messages(self, messages: Sequence[Message]) -> None:
        operations, senders = [], []
        rank = self._store.global_rank
        for message in messages:
            if message.source == rank:
                buffer = _pack(self._gradient_rows(message), self._options.dtype)
                self._sent.append(buffer)
                operations.append(
                    dist.P2POp(dist.isend, buffer, message.destination, self._options.group)
                )
            else:
                buffer = torch.empty(
                    self._weights.table.numel(message),
                    dtype=self._options.dtype,
                    device=self._store.device,
                )
                self._contribute(message, self._split(message, buffer))
                operations.append(
                    dist.P2POp(dist.irecv, buffer, message.source, self._options.group)
                )
                senders.append((message.source, buffer.nbytes))
        if operations:
            receives, sends = _split_works(operations, dist.batch_isend_irecv(operations))
            self._works += sends
            if senders:
                self._arriving.append((receives, senders))

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
                else:
                    rows = self._rows_of(total, piece)
                    rows += values.view(rows.shape)
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
        first, last = self._store.intervals[piece.parameter]
        if (piece.start, piece.stop) == (first, last):
            return total
        spec = self._store.specs[piece.parameter]
        return narrow_rows(total, spec, piece.start - first, piece.stop - first)
