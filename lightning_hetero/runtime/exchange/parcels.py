"""Units of any owners and holders: each peer's pieces packed apart, in messages or one collective.

Both ways move the same bytes, and sum gradients in the same order. A collective is one call however
many the peers are (`all_to_all_single`, which under NCCL sends nothing where a peer gets nothing);
messages tell which peer was late, and on gloo they are quicker among few ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.core.slices import Interval, ParameterSpec
from lightning_hetero.core.transfers import Move, Unit
from lightning_hetero.runtime.exchange.messages import ExchangeOptions, split_works, wait_for_all
from lightning_hetero.runtime.slices.weights import ComputeWeights, SliceStore, narrow_rows

__all__ = ["Parcel", "PulledParcels", "PushedParcels", "parcels_of"]


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one parameter in a parcel."""

    index: int
    """Of the parameter in its unit."""
    numel: int
    held: Interval
    """Where they lie in this rank's shard, if it holds them."""
    owned: Interval
    """Where they lie in this rank's slice, if it owns them."""
    is_whole_slice: bool
    """Whether they are all that this rank owns."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """What goes from one rank to another in every exchange of a unit, or stays where it is."""

    source: int
    destination: int
    pipeline_index: int
    """The holder's."""
    parts: tuple[_Part, ...]
    numel: int


def parcels_of(
    unit: Unit, store: SliceStore, weights: ComputeWeights, *, push: bool
) -> tuple[Parcel, ...]:
    """Return what this rank sends, gets or keeps of a unit; the same for all units of its kind."""
    parcels = []
    for move in unit.kind.moves(store.global_rank, push=push):
        holder = move.source if push else move.destination
        holding = weights.table.holding(unit.specs[move.pieces[0][0]].name, holder)
        assert holding is not None
        parcels.append(
            Parcel(
                move.source,
                move.destination,
                holding.pipeline_index,
                tuple(_parts(unit, move, store, weights, push=push)),
                unit.kind.numel(move),
            )
        )
    return tuple(parcels)


def _parts(
    unit: Unit, move: Move, store: SliceStore, weights: ComputeWeights, *, push: bool
) -> list[_Part]:
    holder, owner = (move.source, move.destination) if push else (move.destination, move.source)
    parts = []
    for index, start, stop in move.pieces:
        name, held, owned = unit.specs[index].name, (0, 0), (0, 0)
        first, last = store.intervals[name]
        if holder == store.global_rank:
            found = weights.local_rows(name, start, stop)
            assert found is not None, f"rows {start}-{stop} of {name} are not held here"
            held = found
        if owner == store.global_rank:
            owned = start - first, stop - first
        numel = (stop - start) * unit.kind.row_numels[index]
        parts.append(_Part(index, numel, held, owned, (start, stop) == (first, last)))
    return parts


@dataclass
class _Sent:
    """Rows that leave this rank for one or more peers alike."""

    peers: list[int]
    rows: list[Tensor]

    def flat(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the rows, each in one dim."""
        return [row.to(dtype).reshape(-1) for row in self.rows]


@dataclass
class _Unit:
    """One unit's part in every exchange: what is sent, received and kept."""

    unit: Unit
    parcels: tuple[Parcel, ...]
    store: SliceStore
    weights: ComputeWeights
    options: ExchangeOptions
    group: dist.ProcessGroup | None
    """The communicator of all members of the unit; None if they send messages."""
    _receives: list[dist.Work] = field(default_factory=list, init=False)
    _sends: list[dist.Work] = field(default_factory=list, init=False)
    _kept: list[Tensor] = field(default_factory=list, init=False)
    """What may not be freed while it is sent."""

    @property
    def travels(self) -> bool:
        """Whether this rank takes part in a communication."""
        rank = self.store.global_rank
        return self.group is not None or any(
            not parcel.source == rank == parcel.destination for parcel in self.parcels
        )

    @cached_property
    def _arriving(self) -> list[Parcel]:
        rank = self.store.global_rank
        return [item for item in self.parcels if item.destination == rank != item.source]

    def _spec(self, part: _Part) -> ParameterSpec:
        return self.unit.specs[part.index]

    def _exchange(self, sent: Sequence[_Sent]) -> list[Tensor]:
        """Post what goes to peers; returns the buffers in which parcels arrive."""
        if self.group is None:
            return self._exchange_messages(sent)
        return self._exchange_together(self.group, sent)

    def _exchange_messages(self, sent: Sequence[_Sent]) -> list[Tensor]:
        group, operations, buffers = self.options.group, [], []
        for item in sent:
            self._kept.append(torch.cat(item.flat(self.options.dtype)))
            operations += [
                dist.P2POp(dist.isend, self._kept[-1], peer, group) for peer in item.peers
            ]
        for parcel in self._arriving:
            buffers.append(self._empty(parcel.numel))
            operations.append(dist.P2POp(dist.irecv, buffers[-1], parcel.source, group))
        if operations:
            works = dist.batch_isend_irecv(operations)
            self._receives, self._sends = split_works(operations, works)
        return buffers

    def _exchange_together(self, group: dist.ProcessGroup, sent: Sequence[_Sent]) -> list[Tensor]:
        members = self.unit.kind.members
        rows: dict[int, list[Tensor]] = {}
        for item in sent:
            rows |= dict.fromkeys(item.peers, item.flat(self.options.dtype))
        sizes = {parcel.source: parcel.numel for parcel in self._arriving}
        in_splits = [sum(row.numel() for row in rows.get(peer, ())) for peer in members]
        out_splits = [sizes.get(peer, 0) for peer in members]
        leaving = [row for peer in members for row in rows.get(peer, ())]
        given = torch.cat(leaving) if leaving else self._empty(0)
        received = self._empty(sum(out_splits))
        work = dist.all_to_all_single(
            received, given, out_splits, in_splits, group=group, async_op=True
        )
        self._receives, self._kept = [work], [given]
        by_source = dict(zip(members, torch.split(received, out_splits), strict=True))
        return [by_source[parcel.source] for parcel in self._arriving]

    def _empty(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self.options.dtype, device=self.store.device)

    def _wait_for_arrivals(self) -> None:
        if not self._arriving:
            return
        size = self.options.dtype.itemsize
        senders = [(item.source, item.numel * size) for item in self._arriving]
        wait_for_all(self.options.clock, self._receives, senders)
        self._receives = []

    def finish(self) -> None:
        """Wait until what was sent has left."""
        for work in (*self._receives, *self._sends):
            work.wait()
        self._receives, self._sends, self._kept = [], [], []


@dataclass
class _Views:
    """Views into slices and compute weights, made once: their places never change."""

    copies: list[tuple[Tensor, Tensor]]
    """(target, source) of what is owned and held here."""
    sending: list[_Sent]
    """Peers that need the same rows share one buffer."""
    targets: list[tuple[list[Tensor], list[int]]]
    """Of each parcel that arrives (rows to fill, elements of each)."""


class PulledParcels(_Unit):
    """A unit whose weights come from their owners parcel by parcel."""

    _buffers: list[Tensor]

    @cached_property
    def arriving_weights(self) -> dict[str, nn.Parameter]:
        """The compute weights that a pull brings up to date."""
        rank, names = self.store.global_rank, [spec.name for spec in self.unit.specs]
        return {
            names[part.index]: self.weights.shards[names[part.index]]
            for parcel in self.parcels
            if parcel.destination == rank
            for part in parcel.parts
            if parcel.source != rank or names[part.index] not in self.weights.shared
        }

    @cached_property
    def _views(self) -> _Views:
        views, rank = _Views([], [], []), self.store.global_rank
        sending: dict[tuple[_Part, ...], _Sent] = {}
        for parcel in self.parcels:
            if parcel.source == rank != parcel.destination:
                if parcel.parts not in sending:
                    rows = [self._of_slice(part) for part in parcel.parts]
                    sending[parcel.parts] = _Sent([], rows)
                sending[parcel.parts].peers.append(parcel.destination)
            elif parcel.source != rank:
                targets = [self._of_shard(part) for part in parcel.parts]
                views.targets.append((targets, [part.numel for part in parcel.parts]))
            else:
                views.copies += [
                    (self._of_shard(part), self._of_slice(part))
                    for part in parcel.parts
                    if self._spec(part).name not in self.weights.shared
                ]
        views.sending = list(sending.values())
        return views

    def _of_slice(self, part: _Part) -> Tensor:
        spec = self._spec(part)
        return narrow_rows(self.store.masters[spec.name].detach(), spec, *part.owned)

    def _of_shard(self, part: _Part) -> Tensor:
        spec = self._spec(part)
        return narrow_rows(self.weights.shards[spec.name].detach(), spec, *part.held)

    def post(self) -> None:
        """Copy what is kept here, and post what travels."""
        for target, source in self._views.copies:
            target.copy_(source)
        self._buffers = self._exchange(self._views.sending)

    def wait(self) -> None:
        """Wait for the weights, and put them where they belong."""
        self._wait_for_arrivals()
        for buffer, (targets, sizes) in zip(self._buffers, self._views.targets, strict=True):
            for target, part in zip(targets, torch.split(buffer, sizes), strict=True):
                target.copy_(part.view(target.shape))
        self._buffers = []


class PushedParcels(_Unit):
    """A unit whose gradients go to their owners parcel by parcel."""

    _buffers: dict[int, Tensor]

    @cached_property
    def leaving(self) -> set[str]:
        """The parameters whose gradients leave this rank."""
        rank = self.store.global_rank
        return {
            self._spec(part).name
            for parcel in self.parcels
            if parcel.source == rank != parcel.destination
            for part in parcel.parts
        }

    def post(self) -> None:
        """Post the gradients, which are final."""
        rank = self.store.global_rank
        sent = [
            _Sent([parcel.destination], self._gradients(parcel))
            for parcel in self.parcels
            if parcel.source == rank != parcel.destination
        ]
        buffers = self._exchange(sent)
        sources = [parcel.source for parcel in self._arriving]
        self._buffers = dict(zip(sources, buffers, strict=True))

    def wait(self) -> None:
        """Wait for the other holders' gradients."""
        self._wait_for_arrivals()

    def sum(self) -> dict[str, Tensor]:
        """Return the sums of what this rank owns, in order of pipeline, then rank."""
        rank, totals = self.store.global_rank, dict[str, Tensor]()
        owned = [parcel for parcel in self.parcels if parcel.destination == rank]
        for parcel in sorted(owned, key=lambda item: (item.pipeline_index, item.source)):
            if parcel.source == rank:
                pieces = self._gradients(parcel)
            else:
                sizes = [part.numel for part in parcel.parts]
                pieces = list(torch.split(self._buffers.pop(parcel.source), sizes))
            for part, piece in zip(parcel.parts, pieces, strict=True):
                self._add(totals, part, piece)
        return totals

    def _gradients(self, parcel: Parcel) -> list[Tensor]:
        """Return a parcel's rows of this rank's gradients, zeros where there is none."""
        rows = []
        for part in parcel.parts:
            spec = self._spec(part)
            rows.append(narrow_rows(self.weights.gradient(spec.name), spec, *part.held))
        return rows

    def _add(self, totals: dict[str, Tensor], part: _Part, piece: Tensor) -> None:
        spec = self._spec(part)
        if spec.name not in totals:
            master = self.store.masters[spec.name]
            dtype = torch.promote_types(master.dtype, torch.float32)
            if part.is_whole_slice:
                # Nobody else's in this iteration, so it becomes the sum itself if its dtype allows.
                totals[spec.name] = piece.detach().reshape(master.shape).to(dtype)
                return
            totals[spec.name] = torch.zeros(master.shape, dtype=dtype, device=master.device)
        total = totals[spec.name]
        rows = total if part.is_whole_slice else narrow_rows(total, spec, *part.owned)
        rows += piece.reshape(rows.shape)
