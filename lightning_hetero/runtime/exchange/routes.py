"""Which way each unit goes from and to this rank: messages, or one collective of its members.

A collective needs a communicator of exactly the unit's members. `Communicators` makes them at the
set-up, at most `MAX_EXCHANGE_GROUPS`, and what has none goes by messages. On gloo few ranks send
messages, because they are quicker there and say which peer was late (`MOST_BY_MESSAGES`).
"""

from typing import Protocol

from torch import Tensor, nn

from lightning_hetero.core.transfers import ExchangeKind, TransferTable, Unit, UnitKind
from lightning_hetero.runtime.exchange.even import EvenPieces, GatheredUnit, ScatteredUnit
from lightning_hetero.runtime.exchange.messages import ExchangeOptions
from lightning_hetero.runtime.exchange.parcel_table import Parcels
from lightning_hetero.runtime.exchange.parcels import PulledParcels, PushedParcels
from lightning_hetero.runtime.slices.weights import ComputeWeights, SliceStore

__all__ = ["MOST_BY_MESSAGES", "PulledUnit", "PushedUnit", "Routes", "are_collective"]

MOST_BY_MESSAGES = 8
"""Ranks of a unit that send messages on gloo, unless the kind of exchange is named."""


def are_collective(kind: ExchangeKind, backend: str, num_members: int) -> bool:
    """Return whether a unit of so many members goes by a collective where there is a group."""
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

    def post(self) -> None:
        """Post the gradients, which are final."""

    def wait(self) -> None:
        """Wait for the other holders' gradients."""

    def finish(self) -> None:
        """Wait until what was sent has left."""

    def sum(self) -> dict[str, Tensor]:
        """Return the sums of what this rank owns, in order of pipeline, then rank."""


class Routes:
    """The ways of a plan's units on one rank; found once for all units of a kind, and kept.

    Args:
        table: The plan's.
        store: The rank's slices.
        options: How units travel.
    """

    def __init__(self, table: TransferTable, store: SliceStore, options: ExchangeOptions) -> None:
        self.table = table
        self.options = options
        self._store = store
        self._even: dict[tuple[UnitKind, bool], EvenPieces | None] = {}
        self._parcels: dict[tuple[UnitKind, bool], Parcels] = {}

    def pulled(self, unit: Unit, weights: ComputeWeights) -> PulledUnit | None:
        """Return a unit's part in every pull; None if nothing of it moves here."""
        if self._store.global_rank not in unit.kind.members:
            return None
        group = self.options.group_of(unit.kind.members)
        common = self._store, weights, self.options
        # Rows of a standby that are views of the compute weights must not be gathered over.
        keeps_more = unit.kind.has_standbys and not weights.shared.isdisjoint(
            spec.name for spec in unit.specs
        )
        even = None if group is None else self._find_even(unit, push=False)
        if group is not None and even is not None and not keeps_more:
            return GatheredUnit(unit, even, *common, group)
        pulled = PulledParcels(unit, self._find_parcels(unit, push=False), *common, group)
        return pulled if pulled.travels or pulled.arriving_weights else None

    def pushed(self, unit: Unit, weights: ComputeWeights) -> PushedUnit | None:
        """Return a unit's part in every push; None if nothing of it is held or owned here."""
        if self._store.global_rank not in unit.kind.members:
            return None
        group = self.options.group_of(unit.kind.members)
        common = self._store, weights, self.options
        if group is not None and (even := self._find_even(unit, push=True)) is not None:
            return ScatteredUnit(unit, even, *common, group)
        return PushedParcels(unit, self._find_parcels(unit, push=True), *common, group)

    def _find_even(self, unit: Unit, *, push: bool) -> EvenPieces | None:
        key = unit.kind, push and unit.kind.has_standbys
        if key not in self._even:
            self._even[key] = EvenPieces.of(unit, self._store, push=push)
        return self._even[key]

    def _find_parcels(self, unit: Unit, *, push: bool) -> Parcels:
        key = unit.kind, push
        if key not in self._parcels:
            self._parcels[key] = Parcels(unit, self.table, self._store, push=push)
        return self._parcels[key]
