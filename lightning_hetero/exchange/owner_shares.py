"""Divide ownership among ranks by their capacity, such that owners are holders as far as possible.

A unit is a set of parameters with the same holders: a layer, or all layers between two consecutive
stage boundaries. First each pipeline's holders claim the pipeline's share of a unit, up to their
capacity; the rest goes to other holders of the unit that have room. If something is still left, it
goes to other ranks with near numbers: units and ranks with room are matched in order of rank, which
minimises the sum of distances.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["OwnedUnit", "spread_ownership"]

_NOTHING = 1e-12
"""Shares of a unit below this are rounding errors."""


@dataclass(frozen=True, kw_only=True)
class OwnedUnit:
    """Parameters with the same holders."""

    size: float
    """Number of parameters, above 0."""
    holders: tuple[tuple[int, ...], ...]
    """For each pipeline the global ranks that hold the unit, each an equal part."""


def spread_ownership(units: Sequence[OwnedUnit], shares: Sequence[float]) -> list[dict[int, float]]:
    """Return the owners of each unit: {global rank: share of the unit}, adding up to 1.

    Args:
        units: The units to own.
        shares: Capacity of each global rank, relative to their sum.
    """
    total = sum(unit.size for unit in units)
    whole = sum(shares)
    capacity = [share / whole * total for share in shares]
    owned = _claims_of_holders(units, capacity)
    spare = list(capacity)
    for claims in owned:
        for rank, size in claims.items():
            spare[rank] -= size
    left = [unit.size - sum(claims.values()) for unit, claims in zip(units, owned, strict=True)]
    for unit, claims, index in zip(units, owned, range(len(units)), strict=True):
        for ranks in unit.holders:
            for rank in ranks:
                taken = max(0.0, min(left[index], spare[rank]))
                _give(claims, rank, taken)
                spare[rank] -= taken
                left[index] -= taken
    for index, rank, size in _match(units, left, spare):
        _give(owned[index], rank, size)
    return [_as_shares(unit, claims) for unit, claims in zip(units, owned, strict=True)]


def _claims_of_holders(
    units: Sequence[OwnedUnit], capacity: Sequence[float]
) -> list[dict[int, float]]:
    """Return holders' claims: equal for each pipeline, none above its capacity in total."""
    claims: list[dict[int, float]] = []
    wanted = [0.0] * len(capacity)
    for unit in units:
        own: dict[int, float] = {}
        for ranks in unit.holders:
            for rank in ranks:
                _give(own, rank, unit.size / len(unit.holders) / len(ranks))
        for rank, size in own.items():
            wanted[rank] += size
        claims.append(own)
    rooms = zip(capacity, wanted, strict=True)
    factors = [min(1.0, room / want) if want else 1.0 for room, want in rooms]
    return [{rank: size * factors[rank] for rank, size in own.items()} for own in claims]


def _match(
    units: Sequence[OwnedUnit], left: Sequence[float], spare: Sequence[float]
) -> Iterator[tuple[int, int, float]]:
    """Yield (unit, rank, size) for the unclaimed rest of units, in order of holders' ranks."""

    def middle(index: int) -> float:
        ranks = [rank for own in units[index].holders for rank in own]
        return sum(ranks) / len(ranks)

    order = sorted((i for i in range(len(units)) if left[i] > 0), key=lambda i: (middle(i), i))
    ranks = [rank for rank in range(len(spare)) if spare[rank] > 0]
    position, room = -1, 0.0
    for index in order:
        rest = left[index]
        while rest > 0 and (room > 0 or position + 1 < len(ranks)):
            if room <= 0:
                position += 1
                room = spare[ranks[position]]
            size = min(rest, room)
            yield index, ranks[position], size
            rest -= size
            room -= size


def _give(claims: dict[int, float], rank: int, size: float) -> None:
    if size > 0:
        claims[rank] = claims.get(rank, 0.0) + size


def _as_shares(unit: OwnedUnit, claims: dict[int, float]) -> dict[int, float]:
    """Return a unit's claims as shares of it, without those that are only rounding errors."""
    kept = {rank: size for rank, size in claims.items() if size > _NOTHING * unit.size}
    total = sum(kept.values())
    return {rank: size / total for rank, size in kept.items()}
