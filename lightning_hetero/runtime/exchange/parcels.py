"""Pull and push units whose owners and holders may be any ranks, with one parcel for each peer.

Parcels travel in messages or in one collective; both ways move the same bytes, and sum gradients in
the same order. A collective is a single call for any number of peers (`all_to_all_single`, which
under NCCL sends nothing to a peer that gets nothing). Messages tell which peer was late, and on
gloo they are quicker for a few ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors

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


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of one parameter in a parcel."""

    index: int
    """Index of the parameter in its unit."""
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
    numel: int


class Parcels:
    """The parcels that a rank sends, receives and keeps for any unit of a kind."""

    def __init__(self, unit: Unit, store: SliceStore, *, push: bool) -> None:
        rank = store.global_rank
        by_rank = [placement.holders.by_rank for placement in unit.kind.placements]
        holdings = [found.get(rank) for found in by_rank]
        held_rows = [() if item is None else item.intervals for item in holdings]
        kept_rows = [store.kept[spec.name] for spec in unit.specs]
        found = []
        for move in unit.kind.moves(rank, push=push):
            source, destination = move.source, move.destination
            holder, owner = (source, destination) if push else (destination, source)
            parts = []
            for index, start, stop in move.pieces:
                held = _local(held_rows[index], start, stop) if holder == rank else (0, 0)
                owned = _local(kept_rows[index], start, stop) if owner == rank else (0, 0)
                is_whole = kept_rows[index] == ((start, stop),)
                parts.append(Part(index, held, owned, is_whole))
            index, numel = by_rank[parts[0].index][holder].pipeline_index, unit.kind.numel(move)
            found.append(Parcel(source, destination, index, tuple(parts), numel))
        self.leaving = tuple(p for p in found if p.source == rank != p.destination)
        self.arriving = tuple(p for p in found if p.source != rank == p.destination)
        self.kept = tuple(p for p in found if p.source == rank == p.destination)
        owned_here = (*self.arriving, *self.kept)
        self.summed = tuple(sorted(owned_here, key=lambda p: (p.pipeline_index, p.source)))
        """The parcels that arrive or are kept, in order of pipeline, then rank."""


def _local(intervals: Sequence[Interval], start: int, stop: int) -> Interval:
    local = local_rows(intervals, start, stop)
    assert local is not None, f"rows {start}-{stop} are not held here"
    return local


SentRows = tuple[list[int], list[Tensor]]
"""Peers, and the rows that each of them gets."""


@dataclass(eq=False)
class ParcelUnit:
    """This rank's side of one unit's exchanges: what it sends, receives and copies locally."""

    unit: Unit
    parcels: Parcels
    store: SliceStore
    weights: ComputeWeights
    options: ExchangeOptions
    group: dist.ProcessGroup | None
    """The communicator of all members of the unit; None if they use messages."""
    _receives: list[dist.Work] = field(default_factory=list, init=False)
    _sends: list[dist.Work] = field(default_factory=list, init=False)
    _sent: list[Tensor] = field(default_factory=list, init=False)
    """Tensors that must stay alive while they are sent."""
    _arrived: dict[int, Tensor] = field(default_factory=dict, init=False)
    """The receive buffer of each peer's parcel: its parts end to end."""

    @property
    def travels(self) -> bool:
        """Whether this rank takes part in a communication."""
        return bool(self.group is not None or self.parcels.leaving or self.parcels.arriving)

    def _names(self, parcels: Iterable[Parcel]) -> set[str]:
        return {self._spec(part).name for parcel in parcels for part in parcel.parts}

    def _spec(self, part: Part) -> ParameterSpec:
        return self.unit.specs[part.index]

    def _exchange(self, sent: Sequence[SentRows]) -> None:
        """Post sends and receives."""
        if self.group is None:
            self._exchange_messages(sent)
        else:
            self._exchange_together(self.group, sent)

    def _exchange_messages(self, sent: Sequence[SentRows]) -> None:
        group, operations = self.options.group, []
        # Receives first: gloo sends at once what a peer waits for, without a round trip.
        for parcel in self.parcels.arriving:
            self._arrived[parcel.source] = self._empty(parcel.numel)
            given = self._arrived[parcel.source]
            operations.append(dist.P2POp(dist.irecv, given, parcel.source, group))
        for peers, rows in sent:
            self._sent.append(self._packed(rows))
            operations += [dist.P2POp(dist.isend, self._sent[-1], peer, group) for peer in peers]
        if operations:
            works = dist.batch_isend_irecv(operations)
            self._receives, self._sends = split_works(operations, works)

    def _exchange_together(self, group: dist.ProcessGroup, sent: Sequence[SentRows]) -> None:
        by_peer = {peer: rows for peers, rows in sent for peer in peers}
        leaving = [row for _, rows in sorted(by_peer.items()) for row in rows]
        given = self._packed(leaving) if leaving else self._empty(0)
        to = {parcel.destination: parcel.numel for parcel in self.parcels.leaving}
        come = {parcel.source: parcel.numel for parcel in self.parcels.arriving}
        members = self.unit.kind.members
        giving = [to.get(peer, 0) for peer in members]
        receiving = [come.get(peer, 0) for peer in members]
        received = self._empty(sum(receiving))
        work = dist.all_to_all_single(
            received, given, receiving, giving, group=group, async_op=True
        )
        self._receives, self._sent = [work], [given]
        self._arrived = dict(zip(members, received.split_with_sizes(receiving), strict=True))

    def _packed(self, rows: Sequence[Tensor]) -> Tensor:
        return end_to_end(rows, self.options.dtype, self.store.device)

    def _empty(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self.options.dtype, device=self.store.device)

    def _take(self, parcel: Parcel, like: Sequence[Tensor]) -> list[Tensor]:
        """Return an arrived parcel's parts, in the shapes of `like`, and free its buffer."""
        return split_line(self._arrived.pop(parcel.source), like)

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
        self._receives, self._sends, self._sent = [], [], []
        self._arrived.clear()


def split_line(line: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a line's elements, shaped like some tensors."""
    return list(_unflatten_dense_tensors(line, like))  # type: ignore[no-untyped-call]


class PulledParcels(ParcelUnit):
    """A unit whose weights arrive from their owners as parcels.

    Slices and compute weights never move in memory, so views of them are made once.
    """

    @cached_property
    def arriving_weights(self) -> dict[str, nn.Parameter]:
        """The compute weights that a pull brings up to date."""
        kept = self._names(self.parcels.kept) - self.weights.shared
        names = kept | self._names(self.parcels.arriving)
        return {name: self.weights.shards[name] for name in names}

    @cached_property
    def _copies(self) -> list[tuple[Tensor, Tensor]]:
        """(target, source) of rows that are both owned and held here."""
        parts = (part for parcel in self.parcels.kept for part in parcel.parts)
        shared = self.weights.shared
        return [
            (self._of_shard(part), self._of_slice(part))
            for part in parts
            if self._spec(part).name not in shared
        ]

    @cached_property
    def _targets(self) -> list[list[Tensor]]:
        """The rows that the parts of each arriving parcel fill."""
        return [[*map(self._of_shard, parcel.parts)] for parcel in self.parcels.arriving]

    @cached_property
    def _sending(self) -> list[SentRows]:
        """What is sent; peers that need the same rows share one buffer."""
        sending: dict[tuple[Part, ...], SentRows] = {}
        for parcel in self.parcels.leaving:
            if parcel.parts not in sending:
                sending[parcel.parts] = [], [*map(self._of_slice, parcel.parts)]
            sending[parcel.parts][0].append(parcel.destination)
        return list(sending.values())

    def _of_slice(self, part: Part) -> Tensor:
        spec = self._spec(part)
        return narrow_rows(self.weights.home(spec.name), spec, *part.owned)

    def _of_shard(self, part: Part) -> Tensor:
        spec = self._spec(part)
        return narrow_rows(self.weights.shards[spec.name].data, spec, *part.held)

    def post(self) -> None:
        """Make the local copies, and post sends and receives."""
        copies = self._copies
        if copies and self.store.owned_device != self.store.device:
            for target, source in copies:
                own = end_to_end([source], target.dtype, target.device)
                target.copy_(own.view(target.shape))
        elif copies:
            targets, sources = zip(*copies, strict=True)
            torch._foreach_copy_(targets, sources)
        self._exchange(self._sending)

    def wait(self) -> None:
        """Wait for the weights, and copy them into the compute weights."""
        self._wait_for_arrivals()
        for parcel, targets in zip(self.parcels.arriving, self._targets, strict=True):
            torch._foreach_copy_(targets, self._take(parcel, targets))
