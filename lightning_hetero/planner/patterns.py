"""Which compositions a device group may have, and the linear bound on how many groups fit.

GPUs (or tensor-parallel units) of one type are interchangeable, so a group is known by how many
units of each type it holds: its composition. There are far fewer compositions than assignments of
GPUs to groups, which is what makes AutoHet's Eq. 3 (§III-B) solvable exactly.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.core.errors import PlanningError

__all__ = [
    "CoverBound",
    "cover_bound",
    "enumerate_compositions",
    "quiet_solver",
    "solve_cover",
    "to_solution",
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


@dataclass(frozen=True, kw_only=True)
class CoverBound:
    """What the linear relaxation says about covering all units with compositions."""

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
    solver = quiet_solver()
    for count in counts:
        solver.addVar(-_UNUSED_PENALTY, _UNUSED_PENALTY)
        solver.changeColCost(solver.getNumCol() - 1, float(count))
    columns = np.arange(len(counts), dtype=np.int32)

    def add_row(index: int) -> None:
        row = compositions[index].astype(np.float64)
        solver.addRow(1.0, highspy.kHighsInf, len(columns), columns, row)

    active = {index for index in pool if index < len(compositions)}
    for index in sorted(active):
        add_row(index)
    while True:
        solver.run()
        prices = np.array(solver.getSolution().col_value)
        scores = compositions @ prices
        worst = np.argsort(scores, kind="stable")[:8] if len(scores) > 8 else np.argsort(scores)
        violated = [int(i) for i in worst if scores[i] < 1.0 - _TOLERANCE and int(i) not in active]
        if not violated:
            value = float(counts @ prices)
            slack = max(0.0, 1.0 - float(scores.min()))
            bound = value + slack * float(counts.sum())
            return CoverBound(num_groups=math.floor(bound + 1e-6), value=bound, prices=prices)
        for index in violated:
            add_row(index)
        active.update(violated)
        pool.update(violated)


def solve_cover(
    compositions: IntArray,
    counts: IntArray,
    *,
    num_groups: int,
    time_limit_s: float,
) -> IntArray | None:
    """Return how often to use each composition so that all units form `num_groups` groups or more.

    One integer x_p per composition: Σ x_p·p = counts, Σ x_p ≥ num_groups.

    Raises:
        TimeoutError: HiGHS ran out of time before it knew.
    """
    if not len(compositions):
        return None
    num_columns, num_types = compositions.shape
    solver = quiet_solver()
    solver.setOptionValue("time_limit", max(time_limit_s, 0.01))
    limits = (counts[None, :] // np.maximum(compositions, 1)).astype(np.float64)
    upper = np.where(compositions > 0, limits, np.inf).min(axis=1)
    solver.addVars(num_columns, np.zeros(num_columns), upper)
    indices = np.arange(num_columns, dtype=np.int32)
    integer = [highspy.HighsVarType.kInteger] * num_columns
    solver.changeColsIntegrality(num_columns, indices, np.array(integer))
    for t in range(num_types):
        used = np.flatnonzero(compositions[:, t]).astype(np.int32)
        values = compositions[used, t].astype(np.float64)
        solver.addRow(float(counts[t]), float(counts[t]), len(used), used, values)
    ones = np.ones(num_columns)
    solver.addRow(float(num_groups), highspy.kHighsInf, num_columns, indices, ones)
    solver.run()
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kOptimal:
        return to_solution(solver.getSolution().col_value)
    if status == highspy.HighsModelStatus.kTimeLimit:
        raise TimeoutError
    return None


def to_solution(values: Sequence[float]) -> IntArray:
    """Round a solver's values to integers."""
    rounded: IntArray = np.rint(np.asarray(values)).astype(np.int64)
    return rounded


def quiet_solver() -> highspy.Highs:
    """Return a solver that prints nothing and always does the same."""
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("random_seed", 0)
    return solver
