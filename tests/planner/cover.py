"""Cover all units of each type with groups of allowed compositions (`grouping`)."""

import math
from dataclasses import dataclass

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.planner.linear_program import LinearProgram

# Price of a unit that the relaxation leaves out. Any value gives a valid bound; a group holds at
# most a few hundred units, so this one makes leaving units out unattractive.
_UNUSED_PENALTY = 1000.0
_TOLERANCE = 1e-7


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
        for row in compositions[added]:
            program.add_row(prices_of, row, lower=1.0)
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
