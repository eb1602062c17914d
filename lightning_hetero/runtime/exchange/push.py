"""Push gradients from the holders straight to the owners of slices, and sum them there.

A layer's push is posted inside the last backward, as soon as that has left the layer. The owner
sums the pipelines' pieces in fp32 (or the master's dtype if that is wider) and in pipeline order:
the result is the same bit for bit on every run. A `torch.profiler` trace shows the ranges
"push.post" with their units, and "push.wait".
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.core.errors import StepError
from lightning_hetero.core.slices import Interval, ParameterSpec
from lightning_hetero.core.transfers import Message, Piece
from lightning_hetero.runtime.clock import traced
from lightning_hetero.runtime.exchange.messages import (
    ExchangeOptions,
    in_units,
    pack,
    split_works,
    wait_for_all,
)
from lightning_hetero.runtime.slices.weights import ComputeWeights, SliceStore, narrow_rows

__all__ = ["Push"]


@dataclass(frozen=True)
class _Part:
    """Rows of one parameter in a parcel."""

    spec: ParameterSpec
    numel: int
    held: Interval
    """Where they lie in this rank's shard, if it sends them."""
    owned: Interval
    """Where they lie in this rank's slice, if it owns them."""
    is_whole_slice: bool

    def of_shard(self, gradient: Tensor) -> Tensor:
        """Return them as a view of the gradient of this rank's shard."""
        return narrow_rows(gradient, self.spec, *self.held)

    def of_slice(self, total: Tensor) -> Tensor:
        """Return them as a view of the gradient of this rank's slice."""
        return total if self.is_whole_slice else narrow_rows(total, self.spec, *self.owned)


@dataclass
class _Parcel:
    """A message that this rank sends, receives or keeps in every push, made ready once."""

    source: int
    destination: int
    pipeline_index: int
    """The sender's."""
    parts: list[_Part]
    numel: int
    buffer: Tensor | None = None
    """The message under way in this iteration."""


class Push:
    """Send gradients to the owners of slices, a unit as soon as its last backward has ended.

    Called by every rank once per training iteration: `start`, the last backward pass inside of
    `last_backward`, `finish`. Units leave in one global order, descending, whatever the order in
    which they become ready.
    """

    def __init__(
        self, store: SliceStore, weights: ComputeWeights, options: ExchangeOptions
    ) -> None:
        self._store = store
        self._weights = weights
        self._options = options
        rank = store.global_rank
        self._units: dict[int, list[_Parcel]] = {}
        self._owned: list[_Parcel] = []
        self._sent_by_unit: dict[int, set[str]] = {}
        """The parameters of each unit whose gradients leave this rank."""
        for unit, messages in in_units(weights.table.push(rank)).items():
            parcels = [self._prepare(message) for message in messages]
            self._owned += [item for item in parcels if item.destination == rank]
            travelling = [item for item in parcels if item.source != item.destination]
            if travelling:
                self._units[unit] = travelling
                self._sent_by_unit[unit] = {
                    part.spec.name
                    for item in travelling
                    if item.source == rank
                    for part in item.parts
                }
        self._owned.sort(key=lambda item: (item.pipeline_index, item.source))
        self._waiting: list[int] = []
        self._ready: set[int] = set()
        self._arriving: list[tuple[list[dist.Work], list[tuple[int, int]]]] = []
        self._sending: list[dist.Work] = []
        self._awaited: dict[int, set[str]] | None = None
        """In the last backward pass, the gradients of each unit that have yet to come."""
        for unit, names in self._sent_by_unit.items():
            for name in names:
                hook = self._gradient_hook(unit, name)
                weights.shards[name].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _gradient_hook(self, unit: int, name: str) -> Callable[[Tensor], None]:
        # Weakly: a hook that holds what holds its own tensor is a cycle that torch never collects.
        push = weakref.ref(self)

        def arrived(_: Tensor) -> None:
            alive = push()
            if alive is not None:
                alive._count(unit, name)

        return arrived

    def _count(self, unit: int, name: str) -> None:
        if self._awaited is None:
            return
        awaited = self._awaited[unit]
        if not awaited:
            raise StepError(
                f"The gradient of {name} comes in several parts and was sent after the first, as "
                "under torch.utils.checkpoint with use_reentrant=True. Use use_reentrant=False."
            )
        awaited.discard(name)
        if not awaited:
            self.unit_ready(unit)

    def _prepare(self, message: Message) -> _Parcel:
        holdings = self._weights.table.holdings(message.pieces[0].parameter)
        return _Parcel(
            message.source,
            message.destination,
            next(item.pipeline_index for item in holdings if item.global_rank == message.source),
            [self._part(message, piece) for piece in message.pieces],
            self._weights.table.numel(message),
        )

    def _part(self, message: Message, piece: Piece) -> _Part:
        spec, rank = self._store.specs[piece.parameter], self._store.global_rank
        rows, held, owned = (piece.start, piece.stop), (0, 0), (0, 0)
        first, last = self._store.intervals[piece.parameter]
        if message.source == rank:
            found = self._weights.local_rows(piece.parameter, *rows)
            assert found is not None, f"rows {rows} of {piece.parameter} are not held here"
            held = found
        if message.destination == rank:
            owned = piece.start - first, piece.stop - first
        numel = (piece.stop - piece.start) * spec.row_numel
        return _Part(spec, numel, held, owned, is_whole_slice=rows == (first, last))

    def start(self) -> None:
        """Begin an iteration's push; units of which this rank sends nothing are ready."""
        self._waiting = list(self._units)
        self._ready = {unit for unit, names in self._sent_by_unit.items() if not names}

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Post each unit as soon as its gradients are final, in the backward pass inside."""
        self._awaited = {unit: set(names) for unit, names in self._sent_by_unit.items()}
        try:
            yield
        finally:
            self._awaited = None

    def unit_ready(self, unit: int) -> None:
        """Say that a unit's gradients are final here; posts whatever can go now, in order."""
        self._ready.add(unit)
        while self._waiting and self._waiting[0] in self._ready:
            self._post(self._waiting.pop(0))

    def finish(self) -> dict[str, Tensor]:
        """Post what is left, wait, and return the summed gradient of each slice with rows."""
        while self._waiting:
            self._post(self._waiting.pop(0))
        with traced("push.wait"):
            for works, senders in self._arriving:
                wait_for_all(self._options.clock, works, senders)
            for work in self._sending:
                work.wait()
            self._options.side_stream.join(self._options.side_stream.mark())
        gradients = self._sum()
        self._arriving.clear()
        self._sending.clear()
        for parcels in self._units.values():
            for parcel in parcels:
                parcel.buffer = None
        return gradients

    def gradients(self) -> list[Tensor]:
        """Return the gradients that this rank's backwards have made."""
        shards = self._weights.shards.values()
        return [shard.grad for shard in shards if shard.grad is not None]

    def missing(self) -> list[str]:
        """Return the parameters for which this rank's backward made no gradient."""
        return sorted(
            name
            for name, shard in self._weights.shards.items()
            if shard.requires_grad and shard.grad is None
        )

    def _post(self, unit: int) -> None:
        with traced(f"push.post {unit}"), self._options.side_stream.after_compute():
            parcels, size = self._units[unit], self._options.dtype.itemsize
            operations = [self._operation(parcel) for parcel in parcels]
            receives, sends = split_works(operations, dist.batch_isend_irecv(operations))
            rank = self._store.global_rank
            senders = [(item.source, item.numel * size) for item in parcels if item.source != rank]
            self._sending += sends
            if senders:
                self._arriving.append((receives, senders))

    def _operation(self, parcel: _Parcel) -> dist.P2POp:
        dtype, group = self._options.dtype, self._options.group
        if parcel.source == self._store.global_rank:
            parcel.buffer = pack(self._gradients(parcel), dtype)
            return dist.P2POp(dist.isend, parcel.buffer, parcel.destination, group)
        parcel.buffer = torch.empty(parcel.numel, dtype=dtype, device=self._store.device)
        return dist.P2POp(dist.irecv, parcel.buffer, parcel.source, group)

    def _gradients(self, parcel: _Parcel) -> list[Tensor]:
        """Return a parcel's rows of this rank's gradients, zeros where there is none."""
        rows = []
        for part in parcel.parts:
            shard = self._weights.shards[part.spec.name]
            gradient = torch.zeros_like(shard) if shard.grad is None else shard.grad
            rows.append(part.of_shard(gradient))
        return rows

    def _sum(self) -> dict[str, Tensor]:
        """Return the sums over pipelines, in order of pipeline, then rank."""
        totals: dict[str, Tensor] = {}
        for parcel in self._owned:
            if parcel.buffer is None:
                pieces = self._gradients(parcel)
            else:
                pieces = list(torch.split(parcel.buffer, [part.numel for part in parcel.parts]))
            for part, piece in zip(parcel.parts, pieces, strict=True):
                self._add(totals, part, piece)
        return totals

    def _add(self, totals: dict[str, Tensor], part: _Part, piece: Tensor) -> None:
        name = part.spec.name
        if name not in totals:
            master = self._store.masters[name]
            dtype = torch.promote_types(master.dtype, torch.float32)
            if part.is_whole_slice:
                # Nobody else's in this iteration, so it becomes the sum itself if its dtype allows.
                totals[name] = piece.detach().reshape(master.shape).to(dtype)
                return
            totals[name] = torch.zeros(master.shape, dtype=dtype, device=master.device)
        rows = part.of_slice(totals[name])
        rows += piece.reshape(rows.shape)
