"""Build linear and mixed-integer programmes row by row, and solve them with HiGHS."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.core.arrays import FloatArray, IntArray

_INNER_SEARCHES = (
    "mip_heuristic_run_feasibility_jump",
    "mip_heuristic_run_rens",
    "mip_heuristic_run_rins",
    "mip_heuristic_run_root_reduced_cost",
    "mip_allow_restart",
)
_FEW_VARIABLES = 100
"""Linear programmes of up to so many variables are solved without presolve, which would take longer
than it saves."""
_PROVEN_GAP = 1e-6
"""Relative gap at which an integral solution counts as proven."""
_Solver: Any = highspy.Highs.__base__
"""HiGHS without the callbacks of `Highs`, which take longer to make than a small programme."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """What the solver returned: the best solution and its dual prices."""

    values: FloatArray
    """Values of the variables in the best solution; empty if the solver found none."""
    row_duals: FloatArray
    """For each row, by how much the objective rises if the row's limit rises by 1 (the dual price);
meaningless if there are integral variables."""
    objective: float
    """The objective's value in that solution; infinite if there is none."""

    @property
    def integers(self) -> IntArray:
        """The variables, rounded."""
        return np.rint(self.values).astype(np.int64)


class LinearProgram:
    """A linear or mixed-integer programme to minimise, built row by row.

    Rows may be added after a solve; the next solve then starts from the solution before it. A
    programme has the same solution on every machine.
    """

    def __init__(self) -> None:
        self._solver = _Solver()
        self._solver.setOptionValue("output_flag", False)
        self._solver.setOptionValue("threads", 1)
        self._solver.setOptionValue("random_seed", 0)
        self._is_integral = False
        self._rows: list[tuple[IntArray, FloatArray, float, float]] = []

    def add_variables(
        self,
        *,
        upper: ArrayLike,
        lower: ArrayLike = 0.0,
        cost: ArrayLike = 0.0,
        integral: bool = False,
    ) -> IntArray:
        """Add variables between `lower` and `upper`; return their indices."""
        limits = np.atleast_1d(np.asarray(upper, dtype=np.float64))
        lows, costs = (
            np.ascontiguousarray(np.broadcast_to(np.asarray(item, dtype=np.float64), limits.shape))
            for item in (lower, cost)
        )
        first = self._solver.getNumCol()
        indices = np.arange(first, first + limits.size, dtype=np.int32)
        self._solver.addVars(limits.size, lows, limits)
        self._solver.changeColsCost(limits.size, indices, costs)
        if integral:
            kinds = np.array([highspy.HighsVarType.kInteger] * limits.size)
            self._solver.changeColsIntegrality(limits.size, indices, kinds)
            self._is_integral = True
        return indices.astype(np.int64)

    def add_row(
        self,
        columns: IntArray | Sequence[int],
        coefficients: ArrayLike,
        *,
        lower: float = -np.inf,
        upper: float = np.inf,
    ) -> None:
        """Add `lower <= Σ coefficient·variable <= upper`; each column may be named only once."""
        indices = np.asarray(columns, dtype=np.int64)
        values = np.broadcast_to(np.asarray(coefficients, dtype=np.float64), indices.shape)
        kept = values != 0
        self._rows.append((indices[kept], values[kept], lower, upper))

    def minimize(self, *, max_nodes: int | None = None, gap: float = _PROVEN_GAP) -> Solution:
        """Solve until the optimum is proven or a limit is met.

        Args:
            max_nodes: Most nodes of the branch-and-bound search; None sets no limit.
            gap: Relative distance from the bound that counts as proven, if integral.
        """
        self._flush_rows()
        self._solver.setOptionValue("mip_rel_gap", gap)
        if not self._is_integral and self._solver.getNumCol() <= _FEW_VARIABLES:
            self._solver.setOptionValue("presolve", "off")
        if max_nodes is not None:
            self._solver.setOptionValue("mip_max_nodes", max_nodes)
            # These inner searches take longer than all the nodes of a short search.
            for option in _INNER_SEARCHES:
                self._solver.setOptionValue(option, False)
        self._solver.run()
        return self._solution()

    def _flush_rows(self) -> None:
        if not self._rows:
            return
        columns, values, lower, upper = zip(*self._rows, strict=True)
        starts = np.cumsum([0, *map(len, columns)])
        added = self._solver.addRows(
            len(columns),
            np.array(lower, dtype=np.float64),
            np.array(upper, dtype=np.float64),
            int(starts[-1]),
            starts[:-1].astype(np.int32),
            np.concatenate(columns).astype(np.int32),
            np.concatenate(values),
        )
        assert added != highspy.HighsStatus.kError, "HiGHS refused rows built here"
        self._rows.clear()

    def _solution(self) -> Solution:
        info, feasible = self._solver.getInfo(), highspy.kSolutionStatusFeasible
        is_infeasible = self._solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible
        if is_infeasible or info.primal_solution_status != feasible:
            return Solution(values=np.zeros(0), row_duals=np.zeros(0), objective=np.inf)
        found = self._solver.getSolution()
        return Solution(
            values=np.array(found.col_value),
            row_duals=np.array(found.row_dual),
            objective=float(info.objective_function_value),
        )
