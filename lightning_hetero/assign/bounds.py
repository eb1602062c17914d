"""Lower bounds of the best dispatch: how far a dispatch can be from the optimum of Eq. 3.

`fast_lower_bound_s` costs a fraction of a millisecond; every dispatch carries it.
`dispatch_lower_bound_s` solves a few linear programmes (`covering`) and is much nearer the optimum
where bubbles count.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.assign.cost import CostTable, PipelineCost, as_lengths
from lightning_hetero.assign.covering import (
    ROUNDING,
    SequenceRuns,
    StageSeconds,
    add_cover,
    least_possible_s,
)
from lightning_hetero.assign.greedy import UNFIT_S, fitting_times_s
from lightning_hetero.assign.programme import Programme
from lightning_hetero.core.arrays import FloatArray, IntArray

__all__ = ["dispatch_lower_bound_s", "fast_lower_bound_s"]

_NUM_PRICE_STEPS = 40
_PRECISION = 1e-3


def fast_lower_bound_s(lengths: IntArray, times_s: FloatArray, table: CostTable) -> float:
    """Return the larger of two bounds of the latency of any dispatch.

    One is the sequence that takes longest where it is quickest, alone with its bubbles. The other
    is an area: for any prices u_j that sum to 1 over the pipelines, the work of all sequences at
    their cheapest, `Σ_i min_j u_j·T_j(l_i)`, is at most `Σ_j u_j·max(0, latency - k_j)`, with
    `k_j = c_j·PP_j + (PP_j - 1)·T_j(shortest)`, what a pipeline in use loses at least.
    """
    if not len(lengths):
        return 0.0
    stages = table.num_bubbles + 1
    alone_s = np.where(times_s < UNFIT_S, (times_s + table.c) * stages, np.inf)
    single_s = float(alone_s.min(axis=1).max())
    shortest = int(lengths.min())
    lost_s = table.c * stages + table.num_bubbles * (table.a * shortest + table.b) * shortest
    return max(single_s, _area_bound_s(times_s, lost_s))


def _area_bound_s(times_s: FloatArray, lost_s: FloatArray) -> float:
    """Return the best area bound met while prices move towards overloaded kinds of pipeline."""
    # Equal pipelines share a column: K kinds instead of D pipelines.
    columns, counts = np.unique(np.vstack([times_s, lost_s]), axis=1, return_counts=True)
    kind_times_s, kind_lost_s = columns[:-1], columns[-1]
    # Start from equal prices for what all kinds can hold.
    prices = 1.0 / np.where(kind_times_s < UNFIT_S, kind_times_s, 0.0).sum(axis=0).clip(1e-30)
    best_s = 0.0
    for step in range(_NUM_PRICE_STEPS):
        prices = prices / (prices * counts).sum()
        priced = prices * kind_times_s
        cheapest = priced.argmin(axis=1)
        area_s = float(priced.min(axis=1).sum())
        best_s = max(best_s, _latency_of_area_s(area_s, prices * counts, kind_lost_s))
        if len(counts) == 1:
            break
        chosen_s = kind_times_s[np.arange(len(cheapest)), cheapest]
        loads_s = np.bincount(cheapest, weights=chosen_s, minlength=len(counts)) / counts
        loads_s += kind_lost_s
        prices = prices * np.exp(0.5 / (1 + step / 8) * (loads_s / loads_s.max() - 0.5))
    return best_s


def _latency_of_area_s(area_s: float, weights: FloatArray, lost_s: FloatArray) -> float:
    """Return the least x with `Σ weights·max(0, x - lost) >= area`; weights sum to 1."""
    order = np.argsort(lost_s)
    share = np.cumsum(weights[order])
    offset = np.cumsum(weights[order] * lost_s[order])
    return float(((area_s + offset) / share).min())


def dispatch_lower_bound_s(
    lengths: ArrayLike, pipelines: Sequence[PipelineCost], *, upper_bound_s: float
) -> float:
    """Return a lower bound near the optimum of Eq. 3, by bisection over a linear relaxation.

    A pipeline of latency x whose longest sequence is h has `x - (PP-1)·(T(h) + c)` seconds for its
    micro-batches. Every dispatch of latency x is a cover (`covering`) by the plan's pipelines, so x
    is a lower bound if no cover makes do with a share of 1 of each kind of them.

    Args:
        lengths: [B].
        pipelines: The D pipelines.
        upper_bound_s: Latency of a known dispatch.
    """
    sizes, every = as_lengths(lengths), CostTable.of(pipelines)
    low_s = min(fast_lower_bound_s(sizes, fitting_times_s(sizes, every), every), upper_bound_s)
    kinds = list(dict.fromkeys(pipelines))
    counts = [float(pipelines.count(kind)) for kind in kinds]
    runs = SequenceRuns.of(sizes, CostTable.of(kinds))
    lost_s = runs.table.num_bubbles * (runs.table.times_s(runs.least) + runs.table.c)

    def is_possible(latency_s: float) -> bool:
        programme = Programme()
        slots_s = latency_s - lost_s
        seconds = StageSeconds(slots=slots_s, room=slots_s - runs.table.c)
        opened = add_cover(programme, runs, seconds)
        if opened is None:
            return False
        (share,) = programme.add_variables(upper=np.inf, cost=1.0)
        for columns, count in zip(opened.T, counts, strict=True):
            programme.add_row([*columns, share], [*np.ones(len(columns)), -count], upper=0.0)
        return programme.minimize(time_limit_s=60.0).lower_bound <= 1 + ROUNDING

    return least_possible_s(is_possible, low_s, upper_bound_s, _PRECISION)
