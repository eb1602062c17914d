"""Exchange a unit with its owners by way of *proxies*: holders that each stand for a piece of it.

If owners aren't the holders, as with `Ownership.EVEN`, each of h holders would exchange with every
owner of its rows, and each owner with h holders of every unit. Instead the holders divide a unit
among themselves as if they owned it. In a push they sum in one collective of a `Circle`, and each
proxy sends its sum on, once, to the ranks that keep its rows; a pull goes the same way back. With S
stages of h ranks each, a proxy exchanges with S owners, and an owner with S proxies, for any h.

Floor: h holders of B bytes send B·(h - 1)/h each to sum among themselves, and every row goes to its
owner once, B/h: together as much as each would send straight to owners. Sums are fp32, so with
gradients in bf16 a push moves B/h more. A pull moves no more.

Rows between owners and proxies travel for up to h neighbouring units at once (a *run* of units): no
more bytes than one unit's, and as many messages for a stage as for a layer.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from lightning_hetero.core.owners import cut_among_holders
from lightning_hetero.core.slices import Holders, Holding, Lot
from lightning_hetero.core.transfers import ExchangeKind, Unit, UnitKind

__all__ = ["LEAST_WITH_PROXIES", "ProxyTable", "UnitRun", "are_by_proxies"]

LEAST_WITH_PROXIES = 8
"""Fewest holders for which units that others own go by proxies, unless the kind of exchange is
named. Fewer holders meet few owners anyway, and fp32 sums add 1 / holders to the bytes of bf16
gradients."""


def are_by_proxies(kind: ExchangeKind, num_holders: int) -> bool:
    """Return whether units that others own go by proxies if each row has `num_holders`."""
    if num_holders == 1 or kind is ExchangeKind.MESSAGES:
        return False
    return kind is not ExchangeKind.AUTO or num_holders >= LEAST_WITH_PROXIES


@dataclass(frozen=True)
class UnitRun:
    """Neighbouring units with the same proxies, or a single unit without proxies."""

    units: tuple[Unit, ...]
    """The units as exchanged among holders, ascending; proxies count as owners."""
    rows: Unit | None = None
    """All their rows, as exchanged between owners and proxies, which count as holders; None
    without proxies."""


class ProxyTable:
    """Finds the proxies of units, the same ones on all ranks; computed once per kind of unit."""

    def __init__(self) -> None:
        self._lots: dict[Lot, tuple[Lot, Lot] | None] = {}
        self._among: dict[UnitKind, UnitKind | None] = {}
        self._between: dict[Hashable, UnitKind] = {}

    def among(self, kind: UnitKind) -> UnitKind | None:
        """Return the kind of a unit among its holders, with proxies as owners; it has circles.

        None if the holders form no circles, or if an owner would still exchange with more than half
        of the proxies, as the owner of a whole parameter would.
        """
        if kind not in self._among:
            self._among[kind] = self._find_among(kind)
        return self._among[kind]

    def _find_among(self, kind: UnitKind) -> UnitKind | None:
        lots = []
        for lot in kind.lots:
            pair = self._split(lot)
            if pair is None:
                return None
            lots.append(pair[1])
        among = UnitKind(lots, kind.row_numels)
        circles = among.circles(push=False)
        if circles is None:
            return None
        least = min(len(circle.members) for circle in circles)
        found = (self._split(lot) for lot in set(kind.lots))
        return among if all(pair and 2 * _most_met(pair[0]) <= least for pair in found) else None

    def _split(self, lot: Lot) -> tuple[Lot, Lot] | None:
        """Return two lots: between owners and proxies, and among holders; None without holders."""
        if lot not in self._lots:
            self._lots[lot] = _split(lot)
        return self._lots[lot]

    def runs(self, units: Sequence[Unit], by_proxies: Callable[[Unit], bool]) -> Iterator[UnitRun]:
        """Yield all units, ascending, neighbours with the same proxies together in one run.

        Args:
            units: The units, ascending.
            by_proxies: Tells whether a unit goes by proxies, if it has any.
        """

        def proxies_of(unit: Unit) -> tuple[tuple[int, ...], ...] | None:
            among = self.among(unit.kind) if by_proxies(unit) else None
            circles = None if among is None else among.circles(push=False)
            return None if circles is None else tuple(circle.members for circle in circles)

        for proxies, group in groupby(units, proxies_of):
            found = list(group)
            if proxies is None:
                yield from (UnitRun((unit,)) for unit in found)
                continue
            most = min(map(len, proxies))
            for first in range(0, len(found), most):
                yield self._run_of(found[first : first + most])

    def _run_of(self, units: Sequence[Unit]) -> UnitRun:
        own, lots = [], []
        for unit in units:
            among = self.among(unit.kind)
            assert among is not None
            own.append(Unit(unit.indices, unit.specs, among))
            for lot in unit.kind.lots:
                pair = self._split(lot)
                assert pair is not None
                lots.append(pair[0])
        row_numels = [number for unit in units for number in unit.kind.row_numels]
        indices = tuple(index for unit in units for index in unit.indices)
        specs = tuple(spec for unit in units for spec in unit.specs)
        key = (*lots, *row_numels)
        kind = self._between.setdefault(key, UnitKind(lots, row_numels))
        return UnitRun(tuple(own), Unit(indices, specs, kind))


def _split(lot: Lot) -> tuple[Lot, Lot] | None:
    if not lot.holders.holdings or not lot.slices:
        return None
    pieces = cut_among_holders(lot.holders, lot.slices[-1].stop)
    rows = [((item.start, item.stop),) for item in pieces]
    proxies = tuple(Holding(i.owner, 0, own, own) for i, own in zip(pieces, rows, strict=True))
    held = Holders(proxies, {item.global_rank: item for item in proxies})
    return Lot(held, lot.slices), Lot(lot.holders, pieces)


def _most_met(lot: Lot) -> int:
    """Return the most proxies that any one rank's rows belong to."""
    pieces = [holding.pushes[0] for holding in lot.holders.holdings]
    starts, stops = [start for start, _ in pieces], [stop for _, stop in pieces]
    return max(
        bisect_left(starts, item.stop) - bisect_right(stops, item.start) for item in lot.kept
    )
