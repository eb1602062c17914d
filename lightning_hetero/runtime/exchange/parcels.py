"""Units of any owners and holders: each peer's pieces packed apart, in messages or one collective.

Both ways move the same bytes, and sum gradients in the same order. A collective is one call however
many the peers are (`all_to_all_single`, which under NCCL sends nothing where a peer gets nothing);
messages tell which peer was late, and on gloo they are quicker among few ranks.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.core.slices import Interval, ParameterSpec
from lightning_hetero.core.transfers import Unit
from lightning_hetero.runtime.exchange.messages import ExchangeOptions, split_works, wait_for_all
from lightning_hetero.runtime.exchange.parcel_table import Parcel, Parcels, Part
from lightning_hetero.runtime.exchange.shares import Shares
from lightning_hetero.runtime.slices.host_memory import end_to_end
from lightning_hetero.runtime.slices.weights import ComputeWeights, SliceStore, narrow_rows

__all__ = ["PulledParcels", "PushedParcels"]


@dataclass
class _Sent:
    """Rows that leave this rank for one or more peers alike."""

    peers: list[int]
    numel: int
    rows: list[Tensor]
    """In one dim where that is a view."""


class _Splits(NamedTuple):
    """How the buffers of a collective are cut."""

    given: list[int]
    """Elements for each member."""
    received: list[int]
    """Elements from each member."""
    arriving: list[tuple[int, int]]
    """(member, elements) of those from whom anything comes, ascending."""


@dataclass(eq=False)
class _Unit:
    """One unit's part in every exchange: what is sent, received and kept."""

    unit: Unit
    parcels: Parcels
    store: SliceStore
    weights: ComputeWeights
    options: ExchangeOptions
    group: dist.ProcessGroup | None
    """The communicator of all members of the unit; None if they send messages."""
    _receives: list[dist.Work] = field(default_factory=list, init=False)
    _sends: list[dist.Work] = field(default_factory=list, init=False)
    _kept: list[Tensor] = field(default_factory=list, init=False)
    """Tensors that may not be freed while they are sent."""

    @property
    def travels(self) -> bool:
        """Whether this rank takes part in a communication."""
        return bool(self.group is not None or self.parcels.leaving or self.parcels.arriving)

    def _names(self, indices: Iterable[int]) -> set[str]:
        return {self.unit.specs[index].name for index in indices}

    def _spec(self, part: Part) -> ParameterSpec:
        return self.unit.specs[part.index]

    def _exchange(self, sent: Sequence[_Sent]) -> list[Tensor]:
        """Post what goes to peers; returns the buffers in which parcels arrive."""
        if self.group is None:
            return self._exchange_messages(sent)
        return self._exchange_together(self.group, sent)

    def _exchange_messages(self, sent: Sequence[_Sent]) -> list[Tensor]:
        group, operations, buffers = self.options.group, [], []
        for item in sent:
            self._kept.append(self._packed(item.rows))
            operations += [
                dist.P2POp(dist.isend, self._kept[-1], peer, group) for peer in item.peers
            ]
        for parcel in self.parcels.arriving:
            buffers.append(self._empty(parcel.numel))
            operations.append(dist.P2POp(dist.irecv, buffers[-1], parcel.source, group))
        if operations:
            works = dist.batch_isend_irecv(operations)
            self._receives, self._sends = split_works(operations, works)
        return buffers

    def _exchange_together(self, group: dist.ProcessGroup, sent: Sequence[_Sent]) -> list[Tensor]:
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
    targets: list[Tensor]
    """Of each part that arrives the rows to fill, in one dim where that is a view."""


class PulledParcels(_Unit):
    """A unit whose weights come from their owners parcel by parcel."""

    _buffers: list[Tensor]

    @cached_property
    def arriving_weights(self) -> dict[str, nn.Parameter]:
        """The compute weights that a pull brings up to date."""
        kept = self._names(self.parcels.indices_kept) - self.weights.shared
        names = kept | self._names(self.parcels.indices_arriving)
        return {name: self.weights.shards[name] for name in names}

    @cached_property
    def _views(self) -> _Views:
        sending: dict[tuple[Part, ...], _Sent] = {}
        for parcel in self.parcels.leaving:
            if parcel.parts not in sending:
                rows = [_in_line(self._of_slice(part)) for part in parcel.parts]
                sending[parcel.parts] = _Sent([], parcel.numel, rows)
            sending[parcel.parts].peers.append(parcel.destination)
        return _Views(
            copies=[
                (self._of_shard(part), self._of_slice(part))
                for parcel in self.parcels.kept
                for part in parcel.parts
                if self._spec(part).name not in self.weights.shared
            ],
            sending=list(sending.values()),
            targets=[
                _in_line(self._of_shard(part))
                for parcel in self.parcels.arriving
                for part in parcel.parts
            ],
        )

    def _of_slice(self, part: Part) -> Tensor:
        spec = self._spec(part)
        return narrow_rows(self.store.masters[spec.name].detach(), spec, *part.owned)

    def _of_shard(self, part: Part) -> Tensor:
        spec = self._spec(part)
        return narrow_rows(self.weights.shards[spec.name].detach(), spec, *part.held)

    def post(self) -> None:
        """Copy what is kept here, and post what travels."""
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
        """Wait for the weights, and put them where they belong."""
        self._wait_for_arrivals()
        arrived = zip(self.parcels.arriving, self._buffers, strict=True)
        parts = [part for parcel, buffer in arrived for part in parcel.split(buffer)]
        targets = self._views.targets
        pairs = zip(parts, targets, strict=True)
        parts = [part if to.ndim == 1 else part.view(to.shape) for part, to in pairs]
        if parts:
            torch._foreach_copy_(targets, parts)
        self._buffers = []


class PushedParcels(_Unit):
    """A unit whose gradients go to their owners parcel by parcel."""

    _buffers: dict[int, Tensor]
    _own: Mapping[int, list[Tensor]] = MappingProxyType({})
    """The part that stays here of each gradient of which other rows have left, by parameter."""

    @property
    def leaving(self) -> set[str]:
        """The parameters whose gradients leave this rank."""
        return self._names(self.parcels.indices_leaving)

    def post(self) -> None:
        """Post the gradients that leave, which are final; others may not be here yet."""
        rows: dict[int, list[Tensor]] = defaultdict(list)
        self._own = {}
        for index in self.parcels.indices_leaving:
            own = self._own[index] = []
            for owner, piece in self._shares[index].pieces():
                (own if owner == self.store.global_rank else rows[owner]).append(piece)
        sent = [
            _Sent([parcel.destination], parcel.numel, rows[parcel.destination])
            for parcel in self.parcels.leaving
        ]
        sources = [parcel.source for parcel in self.parcels.arriving]
        self._buffers = dict(zip(sources, self._exchange(sent), strict=True))

    def wait(self) -> None:
        """Wait for the other holders' gradients."""
        self._wait_for_arrivals()

    def sum(self) -> dict[str, Tensor]:
        """Return the sums of what this rank keeps, in order of pipeline, then rank."""
        if self.parcels.has_whole_slices:
            return self._sum_whole_slices()
        totals: dict[str, Tensor] = {}
        for parcel in self.parcels.summed:
            for part, piece in zip(parcel.parts, self._pieces(parcel), strict=True):
                self._add(totals, part, piece)
        return totals

    @property
    def _is_kept_twice(self) -> bool:
        """Whether another rank must get the same sums, bit for bit.

        Then this rank's gradients are rounded as those that travel are, and all are added to zeros,
        or zero to the first, since 0 + -0 is 0.
        """
        return self.unit.kind.has_standbys

    def _sum_whole_slices(self) -> dict[str, Tensor]:
        """Sum slice by slice, in as few operations as there are holders."""
        first, *others = self.parcels.summed
        # Nobody else's in this iteration, so they become the sums themselves if dtypes allow.
        pieces = zip(self._pieces(first), self._summed, strict=True)
        totals = [
            piece if piece.dtype is dtype else piece.to(dtype) for piece, (_, dtype, _) in pieces
        ]
        if self._is_kept_twice:
            totals = list(torch._foreach_add(totals, 0.0))
        for parcel in others:
            torch._foreach_add_(totals, [*self._pieces(parcel)])
        named = zip(self._summed, totals, strict=True)
        return {name: total.view(shape) for (name, _, shape), total in named}

    @cached_property
    def _summed(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        """Names of whole slices, and the dtypes and shapes of their sums."""
        names = [self._spec(part).name for part in self.parcels.summed[0].parts]
        masters = [self.store.masters[name] for name in names]
        return [
            (name, _sum_dtype(master), master.shape)
            for name, master in zip(names, masters, strict=True)
        ]

    def _pieces(self, parcel: Parcel) -> Sequence[Tensor]:
        """Return a parcel's gradients, each in one dim; what has arrived is let go."""
        if parcel.source != self.store.global_rank:
            return parcel.split(self._buffers.pop(parcel.source))
        own, self._own = self._own, MappingProxyType({})
        pieces: list[Tensor] = []
        for index in self.parcels.indices_kept:
            pieces += own[index] if index in own else self._rows_kept(index)
        if self._is_kept_twice:
            pieces = [piece.to(self.options.dtype) for piece in pieces]
        return pieces

    def _rows_kept(self, index: int) -> list[Tensor]:
        shares, rank = self._shares[index].pieces(), self.store.global_rank
        return [piece for owner, piece in shares if owner == rank]

    @cached_property
    def _shares(self) -> dict[int, Shares]:
        """How the gradient of each of this rank's weights falls to its owners, by parameter."""
        found: dict[int, list[tuple[int, Interval]]] = defaultdict(list)
        for parcel in (*self.parcels.leaving, *self.parcels.kept):
            for part in parcel.parts:
                found[part.index].append((parcel.destination, part.held))
        specs = self.unit.specs
        return {
            index: Shares.of(self.weights.shards[specs[index].name], specs[index], shares)
            for index, shares in found.items()
        }

    def _add(self, totals: dict[str, Tensor], part: Part, piece: Tensor) -> None:
        spec = self._spec(part)
        if spec.name not in totals:
            master = self.store.masters[spec.name]
            dtype = _sum_dtype(master)
            if part.is_whole_slice and not self._is_kept_twice:
                # Nobody else's in this iteration, so it becomes the sum itself if its dtype allows.
                totals[spec.name] = piece.reshape(master.shape).to(dtype)
                return
            totals[spec.name] = torch.zeros(master.shape, dtype=dtype, device=piece.device)
        total = totals[spec.name]
        rows = total if part.is_whole_slice else narrow_rows(total, spec, *part.owned)
        rows += piece.reshape(rows.shape)


def _sum_dtype(master: Tensor) -> torch.dtype:
    if master.dtype is torch.float32:
        return torch.float32
    return torch.promote_types(master.dtype, torch.float32)


def _in_line(rows: Tensor) -> Tensor:
    """Return rows in one dim if that is a view, else as they are."""
    return rows.view(-1) if rows.is_contiguous() else rows
