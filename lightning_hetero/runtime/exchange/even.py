"""Pull and push by collectives those units that the ranks of a shard group divide evenly.

Pieces that differ by a row are padded to one size if the padding is small (`MOST_PADDING`). A unit
is then a matrix with one row for each member of the group. A pull is one all-gather. A push is one
all-to-all, after which the owner sums the received gradients in pipeline order, or one
reduce-scatter. Packing takes a few operations per parameter, whatever the number of ranks.

For shard groups see `exchange.transfers.ShardGroup`. Under tensor parallelism, parameters that
every rank of a stage holds whole, such as norms, are divided among the stage's shard groups; after
a pull the stage's ranks gather them from each other. So with 128 pipelines of degree 8 a rank
exchanges with 127 and 7 others, not with 1,023.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.exchange.slices import Interval, ParameterSpec
from lightning_hetero.exchange.transfers import ExchangeKind, Unit
from lightning_hetero.runtime.exchange.messages import ExchangeOptions, sum_dtype, wait_for_all
from lightning_hetero.runtime.ranks.communicators import all_gather_single, reduce_scatter_single
from lightning_hetero.runtime.slices.host_memory import end_to_end
from lightning_hetero.runtime.slices.weights import ComputeWeights, SliceStore, narrow_rows

_MOST_TIMED = 16
"""Largest number of senders of a piece for which waits are recorded by peer: a search for a slow
link probes no more links at once."""


@dataclass(frozen=True)
class _Rows:
    """The layout of one parameter's rows as pieces of equal size.

    Pieces that have fewer rows are padded.
    """

    width: int
    """Rows of each piece, padding included."""
    padded: Tensor | None
    """For each row of the padded pieces, end to end, the parameter's row that it contains; None
    without padding."""
    real: Tensor | None
    """For each row of the parameter, its position among the padded rows; None without padding."""

    @classmethod
    def of(cls, pieces: Sequence[Interval], device: torch.device) -> Self:
        """Lay out the members' pieces."""
        width = max(stop - start for start, stop in pieces)
        if all(piece == (i * width, (i + 1) * width) for i, piece in enumerate(pieces)):
            return cls(width, None, None)
        starts, stops = torch.tensor(pieces, device=device).unbind(1)
        padded = starts[:, None] + torch.arange(width, device=device)
        place = torch.arange(padded.numel(), device=device).view(padded.shape)
        is_real = padded < stops[:, None]
        real = place.new_empty(int(stops.max())).scatter_(0, padded[is_real], place[is_real])
        return cls(width, padded.clamp(max=len(real) - 1).flatten(), real)


class EvenPieces:
    """The layout of any unit of a kind as a rectangle, (members, elements), on one rank.

    Args:
        specs: The parameters of such a unit.
        members: The ranks that divide them, ascending.
        own_rows: The rows that each member has, as [parameter][member].
        store: This rank's slices.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        members: Sequence[int],
        own_rows: Sequence[Sequence[Interval]],
        store: SliceStore,
    ) -> None:
        self.members = members
        self.own_index = members.index(store.global_rank)
        # Parameters that are divided in the same way share one object.
        layouts = {id(pieces): pieces for pieces in own_rows}
        known = {key: _Rows.of(pieces, store.device) for key, pieces in layouts.items()}
        self._rows = [known[id(pieces)] for pieces in own_rows]
        self.own = [pieces[self.own_index] for pieces in own_rows]
        """This rank's own rows of each parameter."""
        self._dims = [spec.cut_dim for spec in specs]
        self._shapes = [
            spec.shape_of_rows(rows.width) if spec.shape else (rows.width,)
            for spec, rows in zip(specs, self._rows, strict=True)
        ]
        self._sizes = [
            spec.row_numel * rows.width for spec, rows in zip(specs, self._rows, strict=True)
        ]
        self.numel = sum(self._sizes)
        """Elements of each member's piece, padding included."""

    def pack_wholes(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the rectangle of whole parameters, (members, elements)."""
        parts = []
        for tensor, rows, dim in zip(tensors, self._rows, self._dims, strict=True):
            whole = tensor.to(dtype) if tensor.ndim else tensor.to(dtype).reshape(1)
            if rows.padded is not None:
                whole = whole.index_select(dim, rows.padded)
            pieces = torch.unflatten(whole, dim, (len(self.members), rows.width)).movedim(dim, 0)
            parts.append(pieces.reshape(len(self.members), -1))
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=1)

    def pack_own(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return this rank's row of the rectangle from its own rows of the parameters."""
        parts = []
        for tensor, shape, dim in zip(tensors, self._shapes, self._dims, strict=True):
            own = tensor.to(dtype) if tensor.ndim else tensor.to(dtype).reshape(1)
            if tuple(own.shape) != shape:
                piece = own.new_zeros(shape)
                piece.narrow(dim, 0, own.shape[dim]).copy_(own)
                own = piece
            parts.append(own.reshape(-1))
        return torch.cat(parts)

    def unpack_wholes(self, rectangle: Tensor, targets: Sequence[Tensor]) -> None:
        """Fill whole parameters from the rectangle."""
        parts = torch.split(rectangle, self._sizes, dim=1)
        items = zip(targets, parts, self._rows, self._shapes, self._dims, strict=True)
        for target, part, rows, shape, dim in items:
            pieces = torch.unflatten(part, 1, shape).movedim(0, dim)
            whole = target if target.ndim else target.reshape(1)
            if rows.real is None:
                torch.unflatten(whole, dim, (len(self.members), rows.width)).copy_(pieces)
            else:
                whole.copy_(pieces.flatten(dim, dim + 1).index_select(dim, rows.real))

    def unpack_own(self, row: Tensor) -> list[Tensor]:
        """Return this rank's own rows of the parameters from its row of the rectangle."""
        return [
            part.view(shape).narrow(dim, 0, stop - start)
            for part, shape, dim, (start, stop) in zip(
                torch.split(row, self._sizes), self._shapes, self._dims, self.own, strict=True
            )
        ]


@dataclass(frozen=True, kw_only=True)
class EvenRoute:
    """The route of a kind of unit whose shard groups divide it evenly.

    A pull first gathers in this rank's shard group. Weights that every rank of a tensor-parallel
    stage holds whole, such as a norm's, have then arrived in pieces, one piece in each shard group;
    so the stage's ranks gather these from each other. Example: stages of ranks (0, 1) and (2, 3)
    hold the same layers, so the shard groups are (0, 2) and (1, 3). Ranks 0 and 2 gather one half
    of a norm, ranks 1 and 3 the other, and then 0 and 1 swap halves.
    """

    group: dist.ProcessGroup
    """The communicator of the shard group."""
    pieces: EvenPieces
    held: tuple[Interval, ...]
    """For each parameter, where the rows that the shard group exchanges are in this rank's shard:
    [first, last + 1)."""
    parts: EvenPieces | None = None
    """The layout of the parameters that the stage's ranks then gather from each other; None if
    there are none."""
    part_indices: tuple[int, ...] = ()
    """The indices of these parameters in the unit."""
    stage_group: dist.ProcessGroup | None = None
    """The communicator of the stage's ranks. Nothing else uses it while a layer waits for
    weights."""

    def narrow(self, tensors: Sequence[Tensor], specs: Sequence[ParameterSpec]) -> list[Tensor]:
        """Return views of the rows that the shard group exchanges.

        The tensors have the shapes of shards.
        """
        return [
            item
            if spec.shape and item.shape[spec.cut_dim] == stop - start
            else narrow_rows(item, spec, start, stop)
            for item, spec, (start, stop) in zip(tensors, specs, self.held, strict=True)
        ]


@dataclass(eq=False)
class _EvenUnit:
    """This rank's side of one unit's exchanges."""

    unit: Unit
    route: EvenRoute
    store: SliceStore
    weights: ComputeWeights
    options: ExchangeOptions
    _work: dist.Work | None = None
    _given: Tensor | None = None
    """What is being sent; it must stay in memory until it has left."""
    _received: Tensor | None = None

    travels = True
    """Whether this rank communicates for the unit."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The communicator on which it travels."""
        return self.route.group

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.options.dtype, device=self.store.device)

    def _wait_for_others(self) -> None:
        assert self._work is not None
        wait_for_all(self.options.clock, [self._work], self._senders)

    @cached_property
    def _senders(self) -> list[tuple[int, int]]:
        """The peers that may be late, each with its bytes; none if there are too many peers."""
        return self._timed(self.route.pieces.members, self.options.dtype)

    def _timed(self, senders: Sequence[int], dtype: torch.dtype) -> list[tuple[int, int]]:
        num_bytes = self.route.pieces.numel * dtype.itemsize
        peers = senders if len(senders) <= _MOST_TIMED else ()
        return [(peer, num_bytes) for peer in peers if peer != self.store.global_rank]

    def finish(self) -> None:
        """Wait until everything sent has left."""
        if self._work is not None:
            self._work.wait()
        self._work = self._given = self._received = None


class GatheredUnit(_EvenUnit):
    """A unit whose weights are gathered from all its members."""

    @cached_property
    def arriving_weights(self) -> dict[str, nn.Parameter]:
        """The compute weights that a pull brings up to date."""
        return {spec.name: self.weights.shards[spec.name] for spec in self.unit.specs}

    @cached_property
    def _views(self) -> tuple[list[Tensor], list[Tensor]]:
        """Owned rows and compute weights, by parameter; their memory never moves."""
        owned = []
        for spec in self.unit.specs:
            master = self.weights.home(spec.name)
            parts = self.store.owned_parts(spec.name, master)
            owned.append(parts[0] if parts else narrow_rows(master, spec, 0, 0))
        return owned, [self.weights.shards[spec.name].data for spec in self.unit.specs]

    @cached_property
    def _shared(self) -> list[Tensor]:
        """The rows of the compute weights that the shard group gathers."""
        return self.route.narrow(self._views[1], self.unit.specs)

    @cached_property
    def _kept(self) -> list[Tensor]:
        """The rows that are kept here as standby and are views of the compute weights."""
        names = [spec.name for spec in self.unit.specs if self.unit.kind.has_standbys]
        return [self.weights.home(name) for name in names if name in self.weights.shared]

    @cached_property
    def _parts(self) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's parts of the parameters that its whole stage holds; then these parameters."""
        indices, wholes = self.route.part_indices, self._views[1]
        return [self._shared[index] for index in indices], [wholes[index] for index in indices]

    def post(self) -> None:
        """Post the all-gather."""
        given = self.route.pieces.pack_own(self._views[0], self.options.dtype)
        if given.device != self.store.device:
            given = end_to_end([given], given.dtype, self.store.device)
        self._given = given
        received = self._received = self._empty(len(self.route.pieces.members) * given.numel())
        self._work = all_gather_single(received, given, self.group, async_op=True)

    def wait(self) -> None:
        """Wait for the weights, and copy them into the compute weights.

        A standby's rows stay as they are: overwriting them by the owner's would hide a difference.
        """
        assert self._received is not None
        self._wait_for_others()
        before = [rows.clone() for rows in self._kept]
        rectangle = self._received.view(len(self.route.pieces.members), -1)
        self.route.pieces.unpack_wholes(rectangle, self._shared)
        self._work = self._received = None
        if self.route.parts is not None:
            self._gather_parts(self.route.parts)
        if before:
            torch._foreach_copy_(self._kept, before)

    def _gather_parts(self, pieces: EvenPieces) -> None:
        """Gather, from the stage's ranks, the parameters that all of them hold."""
        parts, wholes = self._parts
        given = pieces.pack_own(parts, self.options.dtype)
        received = self._empty(len(pieces.members), given.numel())
        all_gather_single(received.view(-1), given, self.route.stage_group)
        pieces.unpack_wholes(received, wholes)


class ScatteredUnit(_EvenUnit):
    """A unit whose gradients are sent to, and summed by, the owners of its rows."""

    @property
    def leaving(self) -> set[str]:
        """The parameters whose gradients leave this rank."""
        return {spec.name for spec in self.unit.specs}

    def _gradients(self) -> list[Tensor]:
        specs = self.unit.specs
        return self.route.narrow([self.weights.gradient(spec.name) for spec in specs], specs)

    def post(self) -> None:
        """Post the gradients, which must be final."""
        given = self._given = self.route.pieces.pack_wholes(self._gradients(), self.options.dtype)
        if self.options.kind is ExchangeKind.REDUCE_SCATTER:
            received = self._received = self._empty(self.route.pieces.numel)
            self._work = reduce_scatter_single(received, given.view(-1), self.group, async_op=True)
        else:
            received = self._received = self._empty(*given.shape)
            self._work = dist.all_to_all_single(received, given, group=self.group, async_op=True)

    def wait(self) -> None:
        """Wait for the other holders' gradients."""
        self._wait_for_others()

    def sum(self) -> dict[str, Tensor]:
        """Return the gradients of what this rank owns, summed in order of pipeline, then rank."""
        masters = {spec.name: self.store.masters[spec.name] for spec in self.unit.specs}
        row = self._sum_up(sum_dtype(masters.values()))
        pairs = zip(masters.items(), self.route.pieces.unpack_own(row), strict=True)
        return {name: own.reshape(item.shape) for (name, item), own in pairs if item.numel()}

    def _sum_up(self, dtype: torch.dtype) -> Tensor:
        """Return the sum of this rank's row of the rectangle."""
        received, own_index = self._received, self.route.pieces.own_index
        assert received is not None
        if self.options.kind is ExchangeKind.REDUCE_SCATTER:  # The backend has summed it.
            return received.to(dtype)
        own = received[own_index]  # Rounded like what the other keeper of the rows gets.
        if not self.unit.kind.has_standbys:
            pieces = self.route.pieces
            found = zip(self._gradients(), self.unit.specs, pieces.own, strict=True)
            rows = [narrow_rows(whole, spec, *ends) for whole, spec, ends in found]
            own = pieces.pack_own(rows, dtype)  # Not rounded, as it doesn't travel.
        first, *others = (own if index == own_index else received[index] for index in self._order)
        total = first.to(dtype, copy=True)
        for item in others:
            total.add_(item)
        return total

    @cached_property
    def _order(self) -> list[int]:
        """Positions of the members in order of pipeline, then rank."""
        holdings = self.weights.table.holdings(self.unit.specs[0].name)
        positions = {rank: index for index, rank in enumerate(self.route.pieces.members)}
        order = sorted(holdings, key=lambda item: (item.pipeline_index, item.global_rank))
        return [positions[i.global_rank] for i in order if i.global_rank in positions]
