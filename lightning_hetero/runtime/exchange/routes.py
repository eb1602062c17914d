"""Which way each unit goes from and to this rank: messages, or collectives of its members.

Where the holders own a unit it takes one collective; where others do, and the holders are many, one
collective of these and few messages between their proxies and the owners. All the rest goes in
pieces to each peer, by messages or one collective.

A collective needs a communicator of exactly the ranks of a circle, or of a unit's members where it
has no circles. `Communicators` makes them at the set-up, at most `MAX_EXCHANGE_GROUPS` for each
rank, and what has none goes by messages. On gloo few ranks send messages, because they are quicker
there and say which peer was late (`MOST_BY_MESSAGES`).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.core.proxies import ProxyTable, UnitRun
from lightning_hetero.core.slices import Interval, ParameterSpec
from lightning_hetero.core.transfers import Circle, ExchangeKind, TransferTable, Unit, UnitKind
from lightning_hetero.runtime.exchange.by_node import NodeWay, Relays, SummedByNode
from lightning_hetero.runtime.exchange.even import (
    EvenPieces,
    EvenWay,
    GatheredUnit,
    ScatteredUnit,
)
from lightning_hetero.runtime.exchange.groups import circles_by_proxies, groups_on_nodes
from lightning_hetero.runtime.exchange.messages import ExchangeOptions, Sums
from lightning_hetero.runtime.exchange.parcel_table import Parcels
from lightning_hetero.runtime.exchange.parcels import PulledParcels
from lightning_hetero.runtime.exchange.proxies import (
    GatheredFromProxies,
    PulledRows,
    PushedRows,
    ScatteredToProxies,
)
from lightning_hetero.runtime.exchange.pushed_parcels import PushedParcels
from lightning_hetero.runtime.slices.weights import ComputeWeights, SliceStore, local_rows

__all__ = [
    "PulledUnit",
    "PushedUnit",
    "Routes",
]


class PulledUnit(Protocol):
    """A unit's part in every pull: `post`, `wait`, `finish`."""

    @property
    def travels(self) -> bool:
        """Whether this rank takes part in a communication."""

    @property
    def arriving_weights(self) -> dict[str, nn.Parameter]:
        """The compute weights that a pull brings up to date."""

    def post(self) -> None:
        """Copy what is kept here, and post what travels."""

    def wait(self) -> None:
        """Wait for the weights, and put them where they belong."""

    def finish(self) -> None:
        """Wait until what was sent has left."""


class PushedUnit(Protocol):
    """A unit's part in every push: `post`, `wait`, `finish`, `sum`."""

    @property
    def travels(self) -> bool:
        """Whether this rank takes part in a communication."""

    @property
    def leaving(self) -> set[str]:
        """The parameters whose gradients leave this rank."""

    def gradients(self) -> list[Tensor]:
        """Return what this rank's backwards have made of it, in as few tensors as there are."""

    def post(self) -> None:
        """Post the gradients, which are final."""

    def wait(self) -> None:
        """Wait for the other holders' gradients."""

    def finish(self) -> None:
        """Wait until what was sent has left."""

    def sum(self) -> Sums:
        """Return the sums of what this rank owns, in order of pipeline, then rank."""


class Routes:
    """The ways of a plan's units on one rank; found once for all units of a kind, and kept.

    Args:
        table: The plan's.
        store: The rank's slices.
        options: How units travel.
        stage_ranks: The ranks of this rank's stage, itself included.
        stage_group: Their communicator; None with one.
    """

    def __init__(
        self,
        table: TransferTable,
        store: SliceStore,
        options: ExchangeOptions,
        *,
        stage_ranks: Sequence[int] = (),
        stage_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.table = table
        self.options = options
        self._store = store
        self._stage_ranks = sorted(stage_ranks)
        self._stage_group = stage_group
        self.proxies = ProxyTable()
        """Who stands between owners and holders."""
        self._even: dict[tuple[UnitKind, bool], EvenWay | None] = {}
        self._parcels: dict[tuple[UnitKind, bool], Parcels] = {}

    def pulls(
        self, units: Sequence[Unit], weights: ComputeWeights
    ) -> Iterator[tuple[Unit, PulledUnit]]:
        """Yield each unit of which anything moves here, ascending, with its part in every pull."""
        common = self._store, weights, self.options
        for run in self._runs(units, push=False):
            rows = None
            if run.rows is not None:
                parcels = self._find_parcels(run.rows, push=False)
                rows = PulledRows(run.rows, parcels, *common, None, self._pieces_of(run))
            for place, unit in enumerate(run.units):
                pulled = self.pulled(unit, weights, rows, place)
                if pulled is not None:
                    yield unit, pulled

    def pushes(
        self, units: Sequence[Unit], weights: ComputeWeights
    ) -> Iterator[tuple[Unit, PushedUnit]]:
        """Yield each unit of which anything is here, descending, with its part in every push."""
        common = self._store, weights, self.options
        for run in reversed([*self._runs(units, push=True)]):
            rows = None
            if run.rows is not None:
                parcels = self._find_parcels(run.rows, push=True)
                rows = PushedRows(run.rows, parcels, *common, None, self._pieces_of(run))
            for place, unit in reversed([*enumerate(run.units)]):
                pushed = self.pushed(unit, weights, rows, place)
                if pushed is not None:
                    yield unit, pushed

    def _runs(self, units: Sequence[Unit], *, push: bool) -> Iterator[UnitRun]:
        return self.proxies.runs(units, partial(self._goes_by_proxies, push=push))

    def _goes_by_proxies(self, unit: Unit, *, push: bool) -> bool:
        """Whether a unit goes by proxies, the same on each rank."""
        options = self.options
        if unit.kind.circles(push=push) is not None or (not push and self._may_be_views(unit)):
            return False
        circles = circles_by_proxies(unit.kind, options.kind, self.proxies)
        return circles is not None and all(
            options.group_of(item.members) is not None for item in circles
        )

    def _pieces_of(self, run: UnitRun) -> list[EvenPieces]:
        """Return how this rank's pieces of a run's units lie; none if it holds none of them."""
        if self._store.global_rank not in run.units[0].kind.members:
            return []
        return [self._way_of_holders(unit).pieces for unit in run.units]

    def _way_of_holders(self, unit: Unit) -> EvenWay:
        """Return how a unit with proxies travels among its holders, in a push as in a pull."""
        way = self._find_even(unit, push=False)
        assert way is not None
        return way

    def pulled(
        self,
        unit: Unit,
        weights: ComputeWeights,
        rows: PulledRows | None = None,
        place: int = 0,
    ) -> PulledUnit | None:
        """Return a unit's part in every pull; None if nothing of it moves here.

        Args:
            unit: As its proxies own it, if it has any.
            weights: Where it is to arrive.
            rows: Those that travel between its owners and its proxies.
            place: The unit's, in the run of these.
        """
        if self._store.global_rank not in unit.kind.members:
            return rows if rows is not None and place == 0 and rows.travels else None
        common = self._store, weights, self.options
        if rows is not None:
            among = self._way_of_holders(unit)
            return GatheredFromProxies(unit, among, *common, rows=rows, place=place)
        if not self._may_be_views(unit) and (way := self._find_even(unit, push=False)) is not None:
            return GatheredUnit(unit, way, *common)
        group = self.options.group_of(unit.kind.members)
        pulled = PulledParcels(unit, self._find_parcels(unit, push=False), *common, group)
        return pulled if pulled.travels or pulled.arriving_weights else None

    def _may_be_views(self, unit: Unit) -> bool:
        """Whether rows of standbys may be views of compute weights: those aren't gathered over.

        The same on each rank, though of a parameter some have such views and others can't: where
        standbys go in a ring, one rank keeps both ends of it.
        """
        masters = (self._store.masters[spec.name] for spec in unit.specs)
        return unit.kind.has_standbys and any(
            not item.is_floating_point() or item.dtype is self.options.dtype for item in masters
        )

    def pushed(
        self,
        unit: Unit,
        weights: ComputeWeights,
        rows: PushedRows | None = None,
        place: int = 0,
    ) -> PushedUnit | None:
        """Return a unit's part in every push; None if nothing of it is held or owned here.

        Arguments as for `pulled`.
        """
        if self._store.global_rank not in unit.kind.members:
            return rows if rows is not None and place == 0 and rows.travels else None
        common = self._store, weights, self.options
        if rows is not None:
            among = self._way_of_holders(unit)
            return ScatteredToProxies(unit, among, *common, rows=rows, place=place)
        if (way := self._find_even(unit, push=True)) is not None:
            if isinstance(way, NodeWay):
                return SummedByNode(unit, way, *common)
            return ScatteredUnit(unit, way, *common)
        group = self.options.group_of(unit.kind.members)
        return PushedParcels(unit, self._find_parcels(unit, push=True), *common, group)

    def _find_even(self, unit: Unit, *, push: bool) -> EvenWay | None:
        key = unit.kind, push
        if key not in self._even:
            self._even[key] = self._even_way(unit, push=push)
        return self._even[key]

    def _even_way(self, unit: Unit, *, push: bool) -> EvenWay | None:
        """Return how a kind of units travels evenly; None if it doesn't, the same on each rank."""
        circles = unit.kind.circles(push=push)
        if circles is None or any(self.options.group_of(i.members) is None for i in circles):
            return None
        rank = self._store.global_rank
        circle = next(item for item in circles if rank in item.members)
        held, parts = [], []
        for index, (spec, rows) in enumerate(zip(unit.specs, circle.held, strict=True)):
            holding = self.table.holders(spec.name)[rank]
            local = local_rows(holding.intervals, *rows)
            assert local is not None
            held.append(local)
            if holding.intervals != holding.pushes and not push:
                parts.append(index)
        group = self.options.group_of(circle.members)
        assert group is not None
        if push and self.options.kind is ExchangeKind.BY_NODE and not unit.kind.has_standbys:
            way = self._node_way(unit, circle, group, tuple(held))
            if way is not None:
                return way
        return EvenWay(
            group=group,
            pieces=EvenPieces(unit.specs, circle.members, circle.pieces, self._store),
            held=tuple(held),
            parts=self._parts_of_stage([unit.specs[i] for i in parts]) if parts else None,
            part_indices=tuple(parts),
            stage_group=self._stage_group,
        )

    def _node_way(
        self, unit: Unit, circle: Circle, group: dist.ProcessGroup, held: tuple[Interval, ...]
    ) -> NodeWay | None:
        """Return how a circle pushes by node; None, the same on each rank, where it doesn't."""
        options, members = self.options, circle.members
        near = groups_on_nodes(members, options.node_of_rank)
        own = members.index(self._store.global_rank)
        relays = Relays.of([options.node_of_rank[rank] for rank in members], own)
        if relays is None or any(options.group_of(ranks) is None for ranks in near):
            return None
        on_node = tuple(members[place] for place in relays.on_node)
        pieces = [[rows[place] for place in relays.order] for rows in circle.pieces]
        ordered = [members[place] for place in relays.order]
        return NodeWay(
            group=group,
            pieces=EvenPieces(unit.specs, ordered, pieces, self._store),
            held=held,
            relays=relays,
            inside=options.group_of(on_node) if len(on_node) > 1 else None,
        )

    def _parts_of_stage(self, specs: Sequence[ParameterSpec]) -> EvenPieces:
        """Return how parameters that all ranks of the stage hold fall to them, a part to each."""
        rows = [
            [holders[rank].pushes[0] for rank in self._stage_ranks]
            for holders in (self.table.holders(spec.name) for spec in specs)
        ]
        return EvenPieces(specs, self._stage_ranks, rows, self._store)

    def _find_parcels(self, unit: Unit, *, push: bool) -> Parcels:
        key = unit.kind, push
        if key not in self._parcels:
            self._parcels[key] = Parcels(unit, self._store, push=push)
        return self._parcels[key]
