"""Holders that stand between other holders and the owners: each is *proxy* for a piece of a unit.

Where owners aren't the holders, as with all ranks owning alike, each of h holders would meet every
owner of the rows it has, and each owner h holders of every unit. Instead holders cut a unit among
themselves as if they owned it. In a push they sum their pieces in one collective of a `Circle`, and
each proxy sends the sum on, once, to those who keep its rows; a pull goes back the same way. With S
stages of h of N = S·h ranks a proxy meets S owners, and an owner S proxies, whatever h is.

Floor: h holders of S bytes that sum among themselves send S·(h - 1)/h each, and every row leaves
for its owner once, S/h: together what each would send straight to owners elsewhere. Sums are fp32,
so of gradients in bf16 a push moves S/h more. A pull moves no more.

The rows between owners and proxies travel for a run of up to h neighbouring units at once: no more
than one unit's bytes, and as many messages for a stage as for a layer.
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
"""Holders from which on units that others own go by proxies, unless the kind of exchange is named.
Fewer meet few owners themselves, and sums that go on, in fp32, add 1 / holders to gradients in
bf16."""


def are_by_proxies(kind: ExchangeKind, num_holders: int) -> bool:
    """Return whether units that others own go by proxies, with so many holders of each piece."""
    if num_holders == 1 or kind is ExchangeKind.MESSAGES:
        return False
    return kind is not ExchangeKind.AUTO or num_holders >= LEAST_WITH_PROXIES


@dataclass(frozen=True)
class UnitRun:
    """Neighbouring units of which the same proxies have the same pieces, or one unit without."""

    units: tuple[Unit, ...]
    """As holders have them and, with proxies, these own them; ascending."""
    rows: Unit | None = None
    """All parameters of these units, as owners keep them and proxies hold them; None without."""


class ProxyTable:
    """Finds the proxies of units, the same on each rank; computed once for units of a kind."""

    def __init__(self) -> None:
        self._lots: dict[Lot, tuple[Lot, Lot] | None] = {}
        self._among: dict[UnitKind, UnitKind | None] = {}
        self._between: dict[Hashable, UnitKind] = {}

    def among(self, kind: UnitKind) -> UnitKind | None:
        """Return a kind of units as if their proxies owned them: they are pulled in circles.

        None where holders aren't circles, or where an owner would still hear from more than half of
        the proxies, as that of a whole parameter.
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
        """Return a lot between owners and proxies, and among holders; None if nobody holds it."""
        if lot not in self._lots:
            self._lots[lot] = _split(lot)
        return self._lots[lot]

    def runs(self, units: Sequence[Unit], by_proxies: Callable[[Unit], bool]) -> Iterator[UnitRun]:
        """Yield all units, ascending: those with proxies together where these are the same.

        Args:
            units: Ascending.
            by_proxies: Says of which units `among` is used.
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
    """Return of how many proxies a rank keeps rows, at most."""
    pieces = [holding.pushes[0] for holding in lot.holders.holdings]
    starts, stops = [start for start, _ in pieces], [stop for _, stop in pieces]
    return max(
        bisect_left(starts, item.stop) - bisect_right(stops, item.start) for item in lot.kept
    )
