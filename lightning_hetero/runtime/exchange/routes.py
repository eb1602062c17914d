"""Choose how each unit travels to and from this rank: by messages, or collectives of its members.

There are three *routes*. Two are for a unit that its shard groups divide evenly (see
`exchange.transfers.ShardGroup`): an `EvenRoute` is one collective in each group; a `NodeRoute`,
under BY_NODE, is the same after a collective in which the group's ranks on each node sum their
gradients. Every other unit travels in *parcels*, one for each peer, by messages or in one
all-to-all.

A collective needs a communicator of exactly the ranks of a shard group, or of a unit's members if
it has no shard groups. Set-up makes at most `MAX_EXCHANGE_GROUPS` per rank; units without one
travel by messages.
"""

from collections.abc import Sequence

import torch.distributed as dist

from lightning_hetero.exchange.slices import Interval, ParameterSpec
from lightning_hetero.exchange.transfers import (
    ExchangeKind,
    ShardGroup,
    TransferTable,
    Unit,
    UnitKind,
)
from lightning_hetero.runtime.exchange.by_node import (
    NodeRoute,
    SummedByNode,
    groups_on_nodes,
    relays_of,
)
from lightning_hetero.runtime.exchange.even import (
    EvenPieces,
    EvenRoute,
    GatheredUnit,
    ScatteredUnit,
)
from lightning_hetero.runtime.exchange.messages import ExchangeOptions
from lightning_hetero.runtime.exchange.parcels import Parcels, PulledParcels
from lightning_hetero.runtime.exchange.pushed_parcels import PushedParcels
from lightning_hetero.runtime.slices.weights import ComputeWeights, SliceStore, local_rows

PulledUnit = GatheredUnit | PulledParcels
"""This rank's side of one unit's pull. In every pull `post`, `wait` and `finish` are called in this
order."""
PushedUnit = ScatteredUnit | PushedParcels
"""This rank's side of one unit's push. In every push `post`, `wait`, `sum` and `finish` are called
in this order."""


class Routes:
    """Makes this rank's side of pulls and pushes; chooses the route once for each kind of unit.

    Args:
        table: The plan's transfer table.
        store: The rank's slices.
        options: How units travel.
        stage_ranks: The ranks of this rank's stage, itself included.
        stage_group: The communicator of the stage; None if it has one rank.
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
        self._even: dict[tuple[UnitKind, bool], EvenRoute | None] = {}
        self._parcels: dict[tuple[UnitKind, bool], Parcels] = {}

    def pulled(self, unit: Unit, weights: ComputeWeights) -> PulledUnit | None:
        """Return this rank's side of a unit's pull; None if it neither sends nor gets rows."""
        if self._store.global_rank not in unit.kind.members:
            return None
        common = self._store, weights, self.options
        if (route := self._find_even(unit, push=False)) is not None:
            return GatheredUnit(unit, route, *common)
        group = self.options.group_of(unit.kind.members)
        pulled = PulledParcels(unit, self._find_parcels(unit, push=False), *common, group)
        return pulled if pulled.travels or pulled.arriving_weights else None

    def pushed(self, unit: Unit, weights: ComputeWeights) -> PushedUnit | None:
        """Return this rank's side of a unit's push; None if this rank holds and owns none of it."""
        if self._store.global_rank not in unit.kind.members:
            return None
        common = self._store, weights, self.options
        if (route := self._find_even(unit, push=True)) is not None:
            if isinstance(route, NodeRoute):
                return SummedByNode(unit, route, *common)
            return ScatteredUnit(unit, route, *common)
        group = self.options.group_of(unit.kind.members)
        return PushedParcels(unit, self._find_parcels(unit, push=True), *common, group)

    def _find_even(self, unit: Unit, *, push: bool) -> EvenRoute | None:
        key = unit.kind, push
        if key not in self._even:
            self._even[key] = self._even_route(unit, push=push)
        return self._even[key]

    def _even_route(self, unit: Unit, *, push: bool) -> EvenRoute | None:
        """Return a kind's route by collectives of shard groups; None if it needs parcels."""
        found = unit.kind.shard_groups(push=push)
        if found is None or any(self.options.group_of(i.members) is None for i in found):
            return None
        rank = self._store.global_rank
        shard_group = next(item for item in found if rank in item.members)
        held, parts = [], []
        for index, (spec, rows) in enumerate(zip(unit.specs, shard_group.held, strict=True)):
            holding = self.table.holders(spec.name)[rank]
            local = local_rows(holding.intervals, *rows)
            assert local is not None
            held.append(local)
            if holding.intervals != holding.pushes and not push:
                parts.append(index)
        group = self.options.group_of(shard_group.members)
        assert group is not None
        if push and self.options.kind is ExchangeKind.BY_NODE:
            by_node = self._node_route(unit, shard_group, group, tuple(held))
            if by_node is not None:
                return by_node
        return EvenRoute(
            group=group,
            pieces=EvenPieces(unit.specs, shard_group.members, shard_group.pieces, self._store),
            held=tuple(held),
            parts=self._parts_of_stage([unit.specs[i] for i in parts]) if parts else None,
            part_indices=tuple(parts),
            stage_group=self._stage_group,
        )

    def _node_route(
        self,
        unit: Unit,
        shard_group: ShardGroup,
        group: dist.ProcessGroup,
        held: tuple[Interval, ...],
    ) -> NodeRoute | None:
        """Return a shard group's route by node; None if nodes have nothing to sum."""
        members, node_of_rank = shard_group.members, self.options.node_of_rank
        groups = groups_on_nodes(members, node_of_rank)
        if not groups or any(self.options.group_of(ranks) is None for ranks in groups):
            return None
        own, nodes = members.index(self._store.global_rank), [node_of_rank[i] for i in members]
        near = [place for place, node in enumerate(nodes) if node == nodes[own]]
        near_ranks = tuple(members[place] for place in near)
        relays_on = {node: relays_of(nodes, node) for node in {*nodes}}
        relays = relays_on[nodes[own]]
        order = sorted(range(len(members)), key=lambda place: (relays[place], place))
        rows = [[pieces[place] for place in order] for pieces in shard_group.pieces]
        return NodeRoute(
            group=group,
            pieces=EvenPieces(unit.specs, [members[i] for i in order], rows, self._store),
            held=held,
            near=near_ranks,
            near_group=self.options.group_of(near_ranks) if len(near) > 1 else None,
            num_pieces=[relays.count(place) for place in near],
            sends=[int(relay == own) for relay in relays],
            receives=[int(relays_on[node][own] == place) for place, node in enumerate(nodes)],
        )

    def _parts_of_stage(self, specs: Sequence[ParameterSpec]) -> EvenPieces:
        """Return how parameters that all ranks of the stage hold are divided among these ranks."""
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
