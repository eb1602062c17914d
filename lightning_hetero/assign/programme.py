"""A thin layer over HiGHS: rows and columns in, a solution with its bound out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import highspy
import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.core.arrays import BoolArray, FloatArray, IntArray

__all__ = ["Programme", "Solution"]

_GAP = 1e-6
"""Relative gap at which an integral solution counts as proven."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """What the solver found."""

    values: FloatArray
    """The variables of the best solution; empty if none was found in time."""
    objective: float
    """Its objective, infinite if there is none."""
    lower_bound: float
    """Proven lower bound of the objective; infinite if the programme has no solution."""


@dataclass(kw_only=True)
class Programme:
    """A linear or mixed-integer programme to minimise, built row by row."""

    _upper: list[FloatArray] = field(default_factory=list)
    _costs: list[FloatArray] = field(default_factory=list)
    _integral: list[BoolArray] = field(default_factory=list)
    _num_variables: int = 0
    _columns: list[IntArray] = field(default_factory=list)
    _coefficients: list[FloatArray] = field(default_factory=list)
    _row_lower: list[float] = field(default_factory=list)
    _row_upper: list[float] = field(default_factory=list)

    def add_variables(
        self, *, upper: ArrayLike, cost: ArrayLike = 0.0, integral: bool = False
    ) -> IntArray:
        """Add variables between 0 and `upper`; return their indices."""
        limits = np.atleast_1d(np.asarray(upper, dtype=np.float64))
        self._upper.append(limits)
        self._costs.append(np.broadcast_to(np.asarray(cost, dtype=np.float64), limits.shape))
        self._integral.append(np.full(limits.shape, integral))
        first = self._num_variables
        self._num_variables += limits.size
        return np.arange(first, self._num_variables)

    def add_row(
        self,
        columns: IntArray | Sequence[int],
        coefficients: ArrayLike,
        *,
        lower: float = -np.inf,
        upper: float = np.inf,
    ) -> None:
        """Add `lower <= Σ coefficient·variable <= upper`; no column twice."""
        indices = np.asarray(columns, dtype=np.int64)
        values = np.broadcast_to(np.asarray(coefficients, dtype=np.float64), indices.shape)
        kept = values != 0
        self._columns.append(indices[kept])
        self._coefficients.append(values[kept])
        self._row_lower.append(lower)
        self._row_upper.append(upper)

    def minimize(self, *, time_limit_s: float, enough: float = -np.inf) -> Solution:
        """Solve until the optimum is proven, the time is over or, if integral, for `enough`."""
        solver = self._run(time_limit_s=time_limit_s, enough=enough)
        status = solver.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return Solution(values=np.zeros(0), objective=np.inf, lower_bound=np.inf)
        info = solver.getInfo()
        objective = float(info.objective_function_value)
        is_integral = any(flags.any() for flags in self._integral)
        bound = objective if status == highspy.HighsModelStatus.kOptimal else -np.inf
        if is_integral:
            bound = float(info.mip_dual_bound)
        if info.primal_solution_status != highspy.kSolutionStatusFeasible:
            return Solution(values=np.zeros(0), objective=float("inf"), lower_bound=bound)
        return Solution(
            values=np.array(solver.getSolution().col_value),
            objective=objective,
            lower_bound=bound,
        )

    def _run(self, *, time_limit_s: float, enough: float) -> Any:
        model = highspy.HighsLp()
        model.num_col_ = self._num_variables
        model.num_row_ = len(self._row_lower)
        model.col_cost_ = np.concatenate(self._costs)
        model.col_lower_ = np.zeros(self._num_variables)
        model.col_upper_ = np.concatenate(self._upper)
        model.row_lower_ = np.array(self._row_lower)
        model.row_upper_ = np.array(self._row_upper)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.cumsum([0, *map(len, self._columns)])
        model.a_matrix_.index_ = np.concatenate(self._columns)
        model.a_matrix_.value_ = np.concatenate(self._coefficients)
        integral = np.concatenate(self._integral)
        if integral.any():
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            model.integrality_ = [kinds[int(flag)] for flag in integral]
        solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("time_limit", time_limit_s)
        solver.setOptionValue("mip_rel_gap", _GAP)
        solver.setOptionValue("objective_target", enough)
        passed = solver.passModel(model)
        assert passed != highspy.HighsStatus.kError, "HiGHS refused a programme built here"
        solver.run()
        return solver
