"""Divide ownership among ranks by their capacity, so that owners are holders as far as possible.

A unit is a set of parameters with the same holders: a layer, or all layers between two neighbouring
stage boundaries. First each pipeline's holders claim the pipeline's share of a unit, as far as
their capacity goes; the rest goes to holders of the unit with room. If some is still left, it goes
to the ranks with room that are nearest in number.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean

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
    whole, total = sum(shares), sum(unit.size for unit in units)
    spare = [share / whole * total for share in shares]
    left = [unit.size for unit in units]
    owned = [defaultdict[int, float](float) for _ in units]

    def give(index: int, rank: int, most: float) -> None:
        size = max(0.0, min(most, left[index], spare[rank]))
        owned[index][rank] += size
        left[index] -= size
        spare[rank] -= size

    claims = [
        (index, rank, unit.size / len(unit.holders) / len(ranks))
        for index, unit in enumerate(units)
        for ranks in unit.holders
        for rank in ranks
    ]
    wanted = defaultdict[int, float](float)
    for _, rank, size in claims:
        wanted[rank] += size
    factors = {rank: min(1.0, spare[rank] / size) for rank, size in wanted.items()}
    for index, rank, size in claims:
        give(index, rank, size * factors[rank])
    least = [_NOTHING * unit.size for unit in units]
    for index, rank, _ in claims:
        if left[index] > least[index]:
            give(index, rank, inf)
    for index, unit in enumerate(units):
        if left[index] <= least[index]:
            continue
        middle = fmean(rank for ranks in unit.holders for rank in ranks)
        for rank in sorted(range(len(spare)), key=lambda rank: abs(rank - middle)):
            give(index, rank, inf)
    return [_as_shares(unit, found) for unit, found in zip(units, owned, strict=True)]


def _as_shares(unit: OwnedUnit, claims: Mapping[int, float]) -> dict[int, float]:
    """Return a unit's claims as shares of it, without those that are only rounding errors."""
    kept = {rank: size for rank, size in claims.items() if size > _NOTHING * unit.size}
    total = sum(kept.values())
    return {rank: size / total for rank, size in kept.items()}
