"""Which compositions a device group may have, and the linear bound on how many groups fit.

GPUs (or tensor-parallel units) of one type are interchangeable, so a group is known by how many
units of each type it holds: its composition. There are far fewer compositions than assignments of
GPUs to groups, which is what makes AutoHet's Eq. 3 (§III-B) solvable exactly.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_hetero.assign.linear_program import LinearProgram
from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.core.errors import PlanningError

__all__ = [
    "CoverBound",
    "OutOfProgramsError",
    "cover_bound",
    "enumerate_compositions",
    "solve_cover",
]

_MAX_COMPOSITIONS = 3_000_000

# Price of a unit that the relaxation leaves out. Any value gives a valid bound; a group holds at
# most a few hundred units, so this one makes leaving units out unattractive.
_UNUSED_PENALTY = 1000.0
_TOLERANCE = 1e-7


def enumerate_compositions(counts: Sequence[int], max_units: int) -> IntArray:
    """Return every composition of 1 to `max_units` units, one row each, one column a type.

    Raises:
        PlanningError: There are more than a few million.
    """
    rows: IntArray = np.zeros((1, 0), dtype=np.int64)
    room: IntArray = np.full(1, max_units, dtype=np.int64)
    for count in counts:
        repeats = np.minimum(room, count) + 1
        total = int(repeats.sum())
        if total > _MAX_COMPOSITIONS:
            raise PlanningError(
                f"Groups of up to {max_units} units of {len(counts)} types have more than "
                f"{_MAX_COMPOSITIONS} compositions. Use fewer device types or a smaller max_stages."
            )
        parents = np.repeat(np.arange(len(rows)), repeats)
        starts = np.repeat(np.cumsum(repeats) - repeats, repeats)
        taken = np.arange(total) - starts
        rows = np.column_stack((rows[parents], taken))
        room = room[parents] - taken
    kept: IntArray = rows[rows.sum(axis=1) > 0]
    return kept


class OutOfProgramsError(Exception):
    """A search has done all the work that it was given; the same input ends at the same work."""


@dataclass(frozen=True, kw_only=True)
class CoverBound:
    """The linear relaxation's bound on covering all units with compositions."""

    num_groups: int
    """No integer cover has more groups."""
    value: float
    """The relaxation's bound before rounding down."""
    prices: FloatArray
    """Dual price of a unit of each type; a composition's price is at least 1."""


def cover_bound(compositions: IntArray, counts: IntArray, pool: set[int]) -> CoverBound:
    """Bound the number of groups that use every unit, by cutting planes on the dual.

    The primal is: maximise Σ x_p over compositions p, subject to Σ x_p·p = counts, x ≥ 0. Its dual
    has one price per type: minimise counts·π subject to p·π ≥ 1 for every p. Rows are added as they
    are violated, so that tens of thousands of compositions cost one matrix product a round.

    Args:
        compositions: Allowed compositions, one row each.
        counts: Units of each type.
        pool: Indices of rows to start with; rows found are added to it.
    """
    program = LinearProgram()
    prices_of = program.add_variables(
        lower=-_UNUSED_PENALTY, upper=np.full(len(counts), _UNUSED_PENALTY), cost=counts
    )
    active = {index for index in pool if index < len(compositions)}
    added = sorted(active)
    while True:
        program.add_rows(prices_of, compositions[added], lower=1.0)
        prices = program.minimize().values
        scores = compositions @ prices
        missed = np.flatnonzero(scores < 1.0 - _TOLERANCE)
        worst = missed[np.argsort(scores[missed], kind="stable")[:8]]
        added = [index for index in worst.tolist() if index not in active]
        if not added:
            value = float(counts @ prices)
            slack = max(0.0, 1.0 - float(scores.min()))
            bound = value + slack * float(counts.sum())
            return CoverBound(num_groups=math.floor(bound + 1e-6), value=bound, prices=prices)
        active.update(added)
        pool.update(added)


def solve_cover(
    compositions: IntArray,
    counts: IntArray,
    *,
    num_groups: int,
    max_nodes: int,
) -> IntArray | None:
    """Return how often to use each composition so that all units form `num_groups` groups or more.

    One integer x_p per composition: Σ x_p·p = counts, Σ x_p ≥ num_groups.

    Raises:
        OutOfProgramsError: HiGHS searched `max_nodes` nodes and didn't know yet.
    """
    if not len(compositions):
        return None
    program = LinearProgram()
    limits = np.where(compositions > 0, counts // np.maximum(compositions, 1), np.inf)
    times = program.add_variables(upper=limits.min(axis=1), integral=True)
    for column, count in zip(compositions.T, counts, strict=True):
        program.add_row(times, column, lower=count, upper=count)
    program.add_row(times, 1.0, lower=num_groups)
    solution = program.minimize(max_nodes=max_nodes)
    if len(solution.values):
        return solution.integers
    if solution.lower_bound == np.inf:
        return None
    raise OutOfProgramsError
