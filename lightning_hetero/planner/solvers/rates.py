"""Choose pipelines that finish the most micro-batches by a time T, in unequal numbers.

If pipelines may run different numbers of micro-batches, groups need not be equally strong, and
Eq. 3's least effective power is the wrong measure. A pipeline of composition p with bottleneck
t_p and fill f_p finishes (T - f_p)/t_p micro-batches by T, so for a given T the programme is

    maximise    Σ_p x_p·(T - f_p)/t_p
    subject to  Σ_p x_p·devices_p ≤ devices of every type,  x_p ≥ 0 and whole,

over compositions of every TP degree. Newton steps find the least T that finishes all M, first with
fractions of pipelines, then with whole ones: T ← (M + Σ x_p·f_p/t_p)/(Σ x_p/t_p).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.planner.solvers.linear_program import LinearProgram, Solution

__all__ = ["PipelineRates", "best_mix", "bottleneck_times_s", "choose_pipelines"]

_MAX_COLUMNS = 100
_NEWTON_STEPS = 8
_WHOLE_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class PipelineRates:
    """Compositions and how fast each is, one row a composition."""

    devices: IntArray
    """[compositions, types] devices that the pipeline takes."""
    slope_s: FloatArray
    """Seconds of each micro-batch; infinite where the model doesn't fit."""
    fill_s: FloatArray
    """Seconds to fill the pipeline, in addition."""


def bottleneck_times_s(
    compositions: IntArray, layer_times_s: Sequence[FloatArray], most_layers: IntArray
) -> FloatArray:
    """Return the least bottleneck of each composition: Eq. 4 for all of them at once.

    Args:
        compositions: Units of each type, one row a composition.
        layer_times_s: For each type, seconds of a micro-batch with 0, 1, ... layers, rising.
        most_layers: For each type, the layers that fit into a unit.

    Returns:
        Seconds; infinite where the layers don't fit.
    """
    num_layers = len(layer_times_s[0]) - 1
    levels = np.unique(np.concatenate([times[1:] for times in layer_times_s]))
    capacity = np.array(
        [
            np.minimum(np.searchsorted(times, levels, side="right") - 1, most)
            for times, most in zip(layer_times_s, most_layers, strict=True)
        ]
    )
    fits = compositions @ capacity >= num_layers
    first = np.argmax(fits, axis=1)
    times: FloatArray = np.where(fits[np.arange(len(fits)), first], levels[first], np.inf)
    return times


def choose_pipelines(
    rates: PipelineRates, counts: IntArray, num_microbatches: int
) -> IntArray | None:
    """Return how often to use each composition, or None if nothing finishes all the work."""
    keep = np.flatnonzero(np.isfinite(rates.slope_s) & (rates.devices <= counts).all(axis=1))
    if not len(keep):
        return None
    devices = rates.devices[keep]
    slope, fill = rates.slope_s[keep], rates.fill_s[keep]

    def finish_s(times: FloatArray | IntArray) -> float:
        return float((num_microbatches + times @ (fill / slope)) / (times @ (1 / slope)))

    # Fractions of pipelines first: they cost little and lead close to the least T.
    time_s = float((fill + slope * num_microbatches).min())
    for _ in range(_NEWTON_STEPS):
        fractions = _best_fractions(devices, (time_s - fill) / slope, counts)
        before_s, time_s = time_s, finish_s(fractions)
        if time_s > before_s * (1 - 1e-3):
            break
    best: IntArray | None = None
    for _ in range(_WHOLE_STEPS):
        work = (time_s - fill) / slope
        times = _most_work(devices, work, counts, num_microbatches)
        if times is None or (best is not None and finish_s(times) >= time_s):
            break
        best, time_s = times, finish_s(times)
    if best is None:
        return None
    result: IntArray = np.zeros(len(rates.slope_s), dtype=np.int64)
    result[keep] = best
    return result


def best_mix(devices: IntArray, work: FloatArray, counts: IntArray) -> float:
    """Return the most work of any fractional mix of pipelines within the cluster.

    Args:
        devices: Devices of each type that a pipeline takes, one row a pipeline.
        work: Work that each pipeline does.
        counts: Devices of each type.
    """
    if not len(work) or work.max() <= 0:
        return 0.0
    prices = _prices(devices, work, counts)
    # Dual prices that are infeasible by rounding are raised until they are feasible and so bound.
    missed = float((work / np.maximum(devices @ prices, 1e-300)).max())
    return float(counts @ prices) * max(missed, 1.0)


def _most_work(
    devices: IntArray, work: FloatArray, counts: IntArray, num_microbatches: int
) -> IntArray | None:
    """Solve the programme for one T, over compositions of least reduced cost; None if unsolved."""
    useful = np.flatnonzero(work >= 1.0)
    if not len(useful):
        return None
    prices = _prices(devices[useful], work[useful], counts)
    loss = (devices[useful] @ prices - work[useful]) / work[useful]
    chosen = useful[_largest(-loss, _MAX_COLUMNS)]
    limits = np.where(devices[chosen] > 0, counts // np.maximum(devices[chosen], 1), np.inf)
    program, used = _work_program(devices[chosen], work[chosen], counts, limits.min(axis=1))
    # Every pipeline needs a micro-batch.
    program.add_row(used, 1.0, upper=num_microbatches)
    # Node limits, not time limits: the same cluster must give the same plan.
    solution = program.minimize(max_nodes=40, gap=2e-3)
    if not len(solution.values):
        return None
    times: IntArray = np.zeros(len(work), dtype=np.int64)
    times[chosen] = solution.integers
    return times


def _best_fractions(devices: IntArray, work: FloatArray, counts: IntArray) -> FloatArray:
    """Return how often the relaxation uses each composition."""
    active, solution = _relax(devices, work, counts)
    times = np.zeros(len(work))
    times[active] = solution.values
    return times


def _prices(devices: IntArray, work: FloatArray, counts: IntArray) -> FloatArray:
    """Return the relaxation's dual price of a device of each type."""
    prices: FloatArray = np.maximum(-_relax(devices, work, counts)[1].row_duals, 0.0)
    return prices


def _relax(devices: IntArray, work: FloatArray, counts: IntArray) -> tuple[IntArray, Solution]:
    """Solve the relaxation by column generation; return its columns and the solution."""
    active = np.sort(_largest(work / devices.sum(axis=1), 32))
    while True:
        program, _ = _work_program(devices[active], work[active], counts)
        solution = program.minimize()
        gain = work - devices @ np.maximum(-solution.row_duals, 0.0)
        better = _largest(gain, 16)
        better = better[gain[better] > 1e-7 * work[better]]
        added = np.union1d(active, better)
        if len(added) == len(active):
            return active, solution
        active = added


def _largest(values: FloatArray, count: int) -> IntArray:
    """Return the indices of the largest values; of equal ones the first, on every machine."""
    if len(values) > count:
        least = np.partition(values, -count)[-count]
        indices = np.flatnonzero(values >= least)
    else:
        indices = np.arange(len(values))
    return indices[np.argsort(-values[indices], kind="stable")[:count]]


def _work_program(
    devices: IntArray, work: FloatArray, counts: IntArray, whole_up_to: FloatArray | None = None
) -> tuple[LinearProgram, IntArray]:
    """Return the programme and its variables: integers up to a limit, or else continuous."""
    program = LinearProgram()
    upper = np.full(len(work), np.inf) if whole_up_to is None else whole_up_to
    used = program.add_variables(upper=upper, cost=-work, integral=whole_up_to is not None)
    for column, count in zip(devices.T, counts, strict=True):
        program.add_row(used, column, upper=count)
    return program, used
