"""Which way each unit goes from and to this rank: messages, or one collective of its members.

A collective needs a communicator of exactly the ranks of a circle, or of a unit's members where it
has no circles. `Communicators` makes them at the set-up, at most `MAX_EXCHANGE_GROUPS` for each
rank, and what has none goes by messages. On gloo few ranks send messages, because they are quicker
there and say which peer was late (`MOST_BY_MESSAGES`).
"""

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.core.slices import ParameterSpec
from lightning_hetero.core.transfers import ExchangeKind, TransferTable, Unit, UnitKind
from lightning_hetero.runtime.exchange.even import (
    EvenPieces,
    EvenWay,
    GatheredUnit,
    ScatteredUnit,
)
from lightning_hetero.runtime.exchange.messages import ExchangeOptions, Sums
from lightning_hetero.runtime.exchange.parcel_table import Parcels
from lightning_hetero.runtime.exchange.parcels import PulledParcels
from lightning_hetero.runtime.exchange.pushed_parcels import PushedParcels
from lightning_hetero.runtime.slices.weights import ComputeWeights, SliceStore, local_rows

__all__ = ["MOST_BY_MESSAGES", "PulledUnit", "PushedUnit", "Routes", "are_collective"]

MOST_BY_MESSAGES = 8
"""Ranks of a unit that send messages on gloo, unless the kind of exchange is named."""


def are_collective(kind: ExchangeKind, backend: str, num_members: int) -> bool:
    """Return whether units of `num_members` go by a collective where there is a group."""
    if num_members == 1 or kind is ExchangeKind.MESSAGES:
        return False
    return kind is not ExchangeKind.AUTO or backend != "gloo" or num_members > MOST_BY_MESSAGES


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
        self._even: dict[tuple[UnitKind, bool], EvenWay | None] = {}
        self._parcels: dict[tuple[UnitKind, bool], Parcels] = {}

    def pulled(self, unit: Unit, weights: ComputeWeights) -> PulledUnit | None:
        """Return a unit's part in every pull; None if nothing of it moves here."""
        if self._store.global_rank not in unit.kind.members:
            return None
        common = self._store, weights, self.options
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

    def pushed(self, unit: Unit, weights: ComputeWeights) -> PushedUnit | None:
        """Return a unit's part in every push; None if nothing of it is held or owned here."""
        if self._store.global_rank not in unit.kind.members:
            return None
        common = self._store, weights, self.options
        if (way := self._find_even(unit, push=True)) is not None:
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
        return EvenWay(
            group=group,
            pieces=EvenPieces(unit.specs, circle.members, circle.pieces, self._store),
            held=tuple(held),
            parts=self._parts_of_stage([unit.specs[i] for i in parts]) if parts else None,
            part_indices=tuple(parts),
            stage_group=self._stage_group,
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
            self._parcels[key] = Parcels(unit, self.table, self._store, push=push)
        return self._parcels[key]
