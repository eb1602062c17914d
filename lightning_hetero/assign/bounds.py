"""Lower bounds of the best dispatch: how far a dispatch can be from the optimum of Eq. 3.

`fast_lower_bound_s` costs a fraction of a millisecond; every dispatch carries it.
`dispatch_lower_bound_s` solves a few linear programmes and is much nearer the optimum where bubbles
count.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.assign.cost import (
    CostTable,
    FloatArray,
    IntArray,
    PipelineCost,
    as_lengths,
)
from lightning_hetero.assign.greedy import UNFIT_S, fitting_times_s
from lightning_hetero.assign.programme import Programme

__all__ = ["dispatch_lower_bound_s", "fast_lower_bound_s"]

_NUM_PRICE_STEPS = 40


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
    lengths: ArrayLike,
    pipelines: Sequence[PipelineCost],
    *,
    upper_bound_s: float,
    precision: float = 1e-3,
) -> float:
    """Return a lower bound near the optimum of Eq. 3, by bisection over a linear relaxation.

    For a latency x the relaxation asks for shares `f[i, k]` of sequence i on kind k of pipeline and
    numbers `y[i, k]` of pipelines of kind k whose longest sequence is i, sequences longest first:

    - `Σ_k f[i, k] = 1`, and `Σ_i y[i, k] <= pipelines of kind k`;
    - the work of the sequences up to i fits: `Σ_{h<=i} f[h, k]·T_k(h) <= Σ_{h<=i} y[h, k]·r[h, k]`
      with `r[h, k] = x - (PP-1)·T_k(h) - c·PP`, what such a pipeline has left;
    - their number fits: `Σ_{h<=i} f[h, k] <= Σ_{h<=i} y[h, k]·⌊r[h, k] / T_k(i)⌋`, as a pipeline
      holds at most that many sequences of i's length or more.

    Every dispatch of latency x satisfies it, so an x without solution is a lower bound.

    Args:
        lengths: [B].
        pipelines: The D pipelines.
        upper_bound_s: Latency of a known dispatch.
        precision: Relative width at which the bisection ends.
    """
    sizes = np.sort(as_lengths(lengths))[::-1].copy()
    low_s = fast_lower_bound_s(
        sizes, fitting_times_s(sizes, CostTable.of(pipelines)), CostTable.of(pipelines)
    )
    low_s = min(low_s, upper_bound_s)
    high_s = upper_bound_s
    kinds = list(dict.fromkeys(pipelines))
    table = CostTable.of(kinds)
    counts = np.array([pipelines.count(kind) for kind in kinds], dtype=np.float64)
    times_s = fitting_times_s(sizes, table)
    while high_s - low_s > precision * high_s:
        middle_s = (low_s + high_s) / 2
        if _relaxation(times_s, table, counts, middle_s).is_feasible():
            high_s = middle_s
        else:
            low_s = middle_s
    return low_s


def _relaxation(
    times_s: FloatArray, table: CostTable, counts: FloatArray, latency_s: float
) -> Programme:
    """Return the linear programme of `dispatch_lower_bound_s` for one latency.

    With B sequences and K kinds there are 2·B·K variables and 2·B²·K nonzeros: small for tens of
    sequences, which is where the fast bound leaves a gap.
    """
    num_sequences, num_kinds = times_s.shape
    left_s = latency_s - table.num_bubbles * times_s - table.c * (table.num_bubbles + 1)
    allowed = times_s <= left_s * (1 + 1e-12)
    left_s = np.maximum(left_s, 0.0)
    programme = Programme()
    shares = programme.add_variables(upper=np.where(allowed, 1.0, 0.0).ravel())
    opened = programme.add_variables(upper=np.where(allowed, counts[None, :], 0.0).ravel())
    shares, opened = shares.reshape(allowed.shape), opened.reshape(allowed.shape)
    for index in range(num_sequences):
        programme.add_row(shares[index], np.ones(num_kinds), lower=1.0, upper=1.0)
    for kind in range(num_kinds):
        share, count = shares[:, kind], opened[:, kind]
        programme.add_row(count, np.ones(num_sequences), upper=float(counts[kind]))
        possible = np.flatnonzero(allowed[:, kind])
        share, count = share[possible], count[possible]
        times, left = times_s[possible, kind], left_s[possible, kind]
        for end in range(1, len(possible) + 1):
            columns = np.concatenate([share[:end], count[:end]])
            programme.add_row(columns, np.concatenate([times[:end], -left[:end]]), upper=0.0)
            fitting = np.floor(left[:end] / times[end - 1] + 1e-9)
            programme.add_row(columns, np.concatenate([np.ones(end), -fitting]), upper=0.0)
    return programme
