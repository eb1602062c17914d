"""Pull and push units whose owners and holders may be any ranks, with one parcel for each peer.

Parcels travel in messages or in one collective; both ways move the same bytes, and sum gradients in
the same order. A collective is a single call for any number of peers (`all_to_all_single`, which
under NCCL sends nothing to a peer that gets nothing). Messages tell which peer was late, and on
gloo they are quicker for a few ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.exchange.slices import Interval, ParameterSpec
from lightning_hetero.exchange.transfers import Unit
from lightning_hetero.runtime.exchange.messages import (
    ExchangeOptions,
    split_works,
    wait_for_all,
)
from lightning_hetero.runtime.slices.host_memory import end_to_end
from lightning_hetero.runtime.slices.weights import (
    ComputeWeights,
    SliceStore,
    local_rows,
    narrow_rows,
)

__all__ = ["Parcel", "ParcelUnit", "Parcels", "Part", "PulledParcels", "SentPart"]


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of one parameter in a parcel."""

    index: int
    """Index of the parameter in its unit."""
    numel: int
    held: Interval
    """The position of these rows in this rank's shard, if it holds them; else (0, 0)."""
    owned: Interval
    """Their position in this rank's slice, if it keeps them; else (0, 0)."""
    is_whole_slice: bool
    """Whether they are all rows of the parameter that this rank keeps."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """Parts of a unit that travel together from one rank to another, or stay on one rank."""

    source: int
    destination: int
    pipeline_index: int
    """Pipeline of the rank that holds the parts."""
    parts: tuple[Part, ...]
    sizes: tuple[int, ...]
    """Elements of each part."""
    numel: int

    def split(self, buffer: Tensor) -> Sequence[Tensor]:
        """Return a buffer's elements part by part, each as a one-dimensional tensor."""
        return buffer.split_with_sizes(self.sizes)


class Parcels:
    """The parcels that a rank sends, receives and keeps for any unit of a kind.

    Args:
        unit: A unit of the kind.
        store: The rank's slices.
        push: Whether the parcels carry gradients to owners; else they carry weights to holders.
    """

    def __init__(self, unit: Unit, store: SliceStore, *, push: bool) -> None:
        rank = store.global_rank
        names = [spec.name for spec in unit.specs]
        by_rank = [placement.holders.by_rank for placement in unit.kind.placements]
        holdings = [found.get(rank) for found in by_rank]
        held_rows = [() if item is None else item.intervals for item in holdings]
        kept_rows = [store.kept[name] for name in names]
        found = []
        for move in unit.kind.moves(rank, push=push):
            source, destination = move.source, move.destination
            holder, owner = (source, destination) if push else (destination, source)
            parts = []
            for index, start, stop in move.pieces:
                held = _local(held_rows[index], start, stop) if holder == rank else (0, 0)
                owned = _local(kept_rows[index], start, stop) if owner == rank else (0, 0)
                numel = (stop - start) * unit.kind.row_numels[index]
                is_whole = kept_rows[index] == ((start, stop),)
                parts.append(Part(index, numel, held, owned, is_whole))
            sizes = tuple(part.numel for part in parts)
            index = by_rank[move.pieces[0][0]][holder].pipeline_index
            parcel = Parcel(source, destination, index, tuple(parts), sizes, sum(sizes))
            found.append(parcel)
        self.leaving = tuple(p for p in found if p.source == rank != p.destination)
        self.arriving = tuple(p for p in found if p.source != rank == p.destination)
        self.kept = tuple(p for p in found if p.source == rank == p.destination)
        owned_here = (*self.arriving, *self.kept)
        self.summed = tuple(sorted(owned_here, key=lambda p: (p.pipeline_index, p.source)))
        """The parcels that arrive or are kept, in order of pipeline, then rank."""
        contents = {tuple(part.index for part in parcel.parts) for parcel in self.summed}
        self.has_whole_slices = len(contents) <= 1 and all(
            part.is_whole_slice for parcel in self.summed for part in parcel.parts
        )
        """Whether `summed` are all whole slices of the same parameters."""
        self.indices_leaving, self.indices_arriving, self.indices_kept = (
            tuple(sorted({part.index for parcel in parcels for part in parcel.parts}))
            for parcels in (self.leaving, self.arriving, self.kept)
        )
        """The parameters of which any rows leave, arrive and are kept."""


def _local(intervals: Sequence[Interval], start: int, stop: int) -> Interval:
    local = local_rows(intervals, start, stop)
    assert local is not None, f"rows {start}-{stop} are not held here"
    return local


@dataclass
class SentPart:
    """Rows that leave this rank; peers that need the same rows share one."""

    peers: list[int]
    rows: list[Tensor]


class _Splits(NamedTuple):
    """How a collective's buffers are divided among the members."""

    given: list[int]
    """Elements for each member."""
    received: list[int]
    """Elements from each member."""
    arriving: list[tuple[int, int]]
    """(member, elements) of the members that send anything, ascending."""


@dataclass(eq=False)
class ParcelUnit:
    """This rank's part in the exchanges of one unit: what it sends, receives and keeps."""

    unit: Unit
    parcels: Parcels
    store: SliceStore
    weights: ComputeWeights
    options: ExchangeOptions
    group: dist.ProcessGroup | None
    """The communicator of all members of the unit; None if they use messages."""
    _receives: list[dist.Work] = field(default_factory=list, init=False)
    _sends: list[dist.Work] = field(default_factory=list, init=False)
    _kept: list[Tensor] = field(default_factory=list, init=False)
    """Tensors that must stay alive while they are sent."""

    @property
    def travels(self) -> bool:
        """Whether this rank takes part in a communication."""
        return bool(self.group is not None or self.parcels.leaving or self.parcels.arriving)

    def _names(self, indices: Iterable[int]) -> set[str]:
        return {self.unit.specs[index].name for index in indices}

    def _spec(self, part: Part) -> ParameterSpec:
        return self.unit.specs[part.index]

    def _exchange(self, sent: Sequence[SentPart]) -> list[Tensor]:
        """Post sends and receives; return the buffers in which parcels arrive, in their order."""
        if self.group is None:
            return self._exchange_messages(sent)
        return self._exchange_together(self.group, sent)

    def _exchange_messages(self, sent: Sequence[SentPart]) -> list[Tensor]:
        group, operations, buffers = self.options.group, [], []
        # Receives first: when a gloo peer waits already, data is sent at once, without a round
        # trip.
        for parcel in self.parcels.arriving:
            buffers.append(self._empty(parcel.numel))
            operations.append(dist.P2POp(dist.irecv, buffers[-1], parcel.source, group))
        for item in sent:
            self._kept.append(self._packed(item.rows))
            operations += [
                dist.P2POp(dist.isend, self._kept[-1], peer, group) for peer in item.peers
            ]
        if operations:
            works = dist.batch_isend_irecv(operations)
            self._receives, self._sends = split_works(operations, works)
        return buffers

    def _exchange_together(
        self, group: dist.ProcessGroup, sent: Sequence[SentPart]
    ) -> list[Tensor]:
        rows = {peer: item.rows for item in sent for peer in item.peers}
        leaving = [row for peer in sorted(rows) for row in rows[peer]]
        given = self._packed(leaving) if leaving else self._empty(0)
        splits = self._splits
        received = self._empty(sum(splits.received))
        work = dist.all_to_all_single(
            received, given, splits.received, splits.given, group=group, async_op=True
        )
        self._receives, self._kept = [work], [given]
        parts = received.split_with_sizes([numel for _, numel in splits.arriving])
        by_source = {source: part for (source, _), part in zip(splits.arriving, parts, strict=True)}
        return [by_source[parcel.source] for parcel in self.parcels.arriving]

    @cached_property
    def _splits(self) -> "_Splits":
        members, parcels = self.unit.kind.members, self.parcels
        to = {parcel.destination: parcel.numel for parcel in parcels.leaving}
        come = {parcel.source: parcel.numel for parcel in parcels.arriving}
        return _Splits(
            given=[to.get(peer, 0) for peer in members],
            received=[come.get(peer, 0) for peer in members],
            arriving=sorted(come.items()),
        )

    def _packed(self, rows: Sequence[Tensor]) -> Tensor:
        return end_to_end(rows, self.options.dtype, self.store.device)

    def _empty(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self.options.dtype, device=self.store.device)

    def _wait_for_arrivals(self) -> None:
        if not self.parcels.arriving:
            return
        size = self.options.dtype.itemsize
        senders = [(item.source, item.numel * size) for item in self.parcels.arriving]
        wait_for_all(self.options.clock, self._receives, senders)
        self._receives = []

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for work in (*self._receives, *self._sends):
            work.wait()
        self._receives, self._sends, self._kept = [], [], []


@dataclass
class _Views:
    """Views into slices and compute weights, which never move in memory, so are made once."""

    copies: list[tuple[Tensor, Tensor]]
    """(target, source) of rows that are both owned and held here."""
    sending: list[SentPart]
    """What is sent; peers that need the same rows share one buffer."""
    targets: list[Tensor]
    """The rows that each arriving part fills, flattened to one dim where a view can do that."""
    are_lines: bool
    """Whether all targets have one dim."""


class PulledParcels(ParcelUnit):
    """A unit whose weights arrive from their owners as parcels."""

    _buffers: list[Tensor]

    @cached_property
    def arriving_weights(self) -> dict[str, nn.Parameter]:
        """The compute weights that a pull brings up to date."""
        kept = self._names(self.parcels.indices_kept) - self.weights.shared
        names = kept | self._names(self.parcels.indices_arriving)
        return {name: self.weights.shards[name] for name in names}

    @cached_property
    def _views(self) -> _Views:
        sending: dict[tuple[Part, ...], SentPart] = {}
        for parcel in self.parcels.leaving:
            if parcel.parts not in sending:
                rows = [_in_line(self._of_slice(part)) for part in parcel.parts]
                sending[parcel.parts] = SentPart([], rows)
            sending[parcel.parts].peers.append(parcel.destination)
        targets = [
            _in_line(self._of_shard(part))
            for parcel in self.parcels.arriving
            for part in parcel.parts
        ]
        return _Views(
            copies=[
                (self._of_shard(part), self._of_slice(part))
                for parcel in self.parcels.kept
                for part in parcel.parts
                if self._spec(part).name not in self.weights.shared
            ],
            sending=list(sending.values()),
            targets=targets,
            are_lines=all(target.ndim == 1 for target in targets),
        )

    def _of_slice(self, part: Part) -> Tensor:
        spec = self._spec(part)
        return narrow_rows(self.weights.home(spec.name), spec, *part.owned)

    def _of_shard(self, part: Part) -> Tensor:
        spec = self._spec(part)
        return narrow_rows(self.weights.written(spec.name), spec, *part.held)

    def post(self) -> None:
        """Make the local copies, and post sends and receives."""
        copies = self._views.copies
        if copies and self.store.owned_device != self.store.device:
            for target, source in copies:
                own = end_to_end([source], target.dtype, target.device)
                target.copy_(own.view(target.shape))
        elif copies:
            targets, sources = zip(*copies, strict=True)
            torch._foreach_copy_(targets, sources)
        self._buffers = self._exchange(self._views.sending)

    def wait(self) -> None:
        """Wait for the weights, and copy them into the compute weights."""
        self._wait_for_arrivals()
        arrived = zip(self.parcels.arriving, self._buffers, strict=True)
        parts = [part for parcel, buffer in arrived for part in parcel.split(buffer)]
        targets = self._views.targets
        if not self._views.are_lines:
            pairs = zip(parts, targets, strict=True)
            parts = [part.view(target.shape) for part, target in pairs]
        if parts:
            torch._foreach_copy_(targets, parts)
        self._buffers = []


def _in_line(rows: Tensor) -> Tensor:
    """Return rows flattened to one dim if that needs no copy, else as they are."""
    return rows.view(-1) if rows.is_contiguous() else rows
