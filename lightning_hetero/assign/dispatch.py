"""Dispatch an iteration's sequences to a plan's pipelines (Hydraulis §6.2, Eq. 3, Algorithm 1).

It minimises, over all pipelines, the largest lower bound of a pipeline's latency, `Σ T(l_i) +
T(longest)·(PP - 1) + c·(PP - 1 + V)`, where V is the least number of micro-batches for its tokens.
Sequences are placed one after another, each on the pipeline that then ends first, in many orders at
once: longest first, the same with several strengths of noise on the lengths, and plain shuffles as
in the paper. Noisy orders matter: on real lengths the best of 100 plain shuffles ends up to 60 %
later than longest first, and mild noise a few per cent earlier. After that the pipeline that ends
last gives a sequence to another one, or exchanges one with it, as long as both then end earlier
than it did. The work is bounded by counts, never by a clock: thousands of sequences, for which the
greedy orders are nearly optimal, get few such steps or none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.assign.pipeline_cost import CostTable, PipelineCost, as_lengths
from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.core.errors import AssignmentError

_NOISES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 100.0)  # So much noise as the last is a plain shuffle.
_NUM_ORDERS = 100
_NUM_IMPROVED = 4  # Best orders whose dispatches are improved.
_LEAST_GAIN = 1e-6  # Of a step, as a share.
_MAX_CELLS = 2e7  # Most orders x sequences x pipelines: about 0.15 s on one core.
_MAX_STEP_CELLS = 1e6  # Most numbers that the steps from one order look at: about as long.


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """The pipeline of each sequence, and when the last pipeline ends."""

    pipeline_of: tuple[int, ...]
    """Index of the pipeline of each sequence."""
    latency_s: float
    """The largest time of a pipeline by Eq. 2, with `c` for each micro-batch (see
    `pipeline_cost.CostTable.ends_s`)."""


def dispatch(lengths: ArrayLike, pipelines: Sequence[PipelineCost]) -> Dispatch:
    """Return the best dispatch found; the same one for the same arguments on every machine.

    It is never worse than longest first (LPT), which is one of the orders. Fewer than 100 orders
    are tried if 100 would take more than a fraction of a second (thousands of sequences on hundreds
    of pipelines).

    Raises:
        AssignmentError: A sequence fits into no pipeline.
    """
    sizes = as_lengths(lengths)
    table = CostTable.of(pipelines)
    _check_fit(sizes, table)
    if not len(sizes):
        return Dispatch(pipeline_of=(), latency_s=0.0)
    num_orders = max(1, min(_NUM_ORDERS, int(_MAX_CELLS / (len(sizes) * len(pipelines)))))
    pipeline_of, latencies_s = _place(sizes, table, _orders(sizes, num_orders))
    starts = pipeline_of[np.argsort(latencies_s, kind="stable")[:_NUM_IMPROVED]]
    improved = [_improve(start, sizes, table) for start in np.unique(starts, axis=0)]
    best_of, latency_s = min(improved, key=lambda item: item[1])
    return Dispatch(pipeline_of=tuple(best_of.tolist()), latency_s=latency_s)


def _check_fit(lengths: IntArray, table: CostTable) -> None:
    limit = int(table.max_len.max())
    if len(lengths) and int(lengths.max()) > limit:
        index = int(lengths.argmax())
        raise AssignmentError(
            f"Sequence {index} has {int(lengths[index])} tokens but the roomiest of "
            f"{len(table.max_len)} pipelines takes {limit}. Cut or split sequences at {limit} "
            "tokens, or add a plan with more memory per token (more tensor parallelism or stages)."
        )


def _orders(lengths: IntArray, num_rows: int) -> IntArray:
    """Return [rows, B] orders: longest first, then ever noisier ones."""
    generator = np.random.default_rng(0)
    noises = np.zeros(num_rows)
    noises[1:] = np.resize(np.array(_NOISES), num_rows - 1)
    keys = np.log(lengths) + noises[:, None] * generator.standard_normal((num_rows, len(lengths)))
    return np.argsort(-keys, axis=1, kind="stable").astype(np.int64)


def _place(lengths: IntArray, table: CostTable, orders: IntArray) -> tuple[IntArray, FloatArray]:
    """Give each sequence, in each row's order, to the pipeline that then ends first (Algorithm 1).

    All rows advance together, one sequence a step, so a step is a dozen NumPy calls on [rows, D]
    arrays, whatever the number of rows: 100 rows, 56 sequences and 16 pipelines are 670 calls.

    That pipeline is also one that keeps the largest end smallest, which is Algorithm 1's rule. If
    several do, the paper takes the first of them, this function the one that ends first.

    Args:
        lengths: [B] tokens of each sequence.
        table: The D pipelines.
        orders: [rows, B] permutations of the sequences.

    Returns:
        The pipeline of each sequence, [rows, B] in the sequences' own order, and each row's largest
        Eq. 2 with c, [rows].
    """
    times_s = table.fitting_times_s(lengths)
    rows = np.arange(len(orders))
    shape = (len(orders), len(table.c))
    work_s, longest_s, tokens = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    pipeline_of = np.empty_like(orders)
    for step in range(len(lengths)):
        sequence = orders[:, step]
        time_s = times_s[sequence]
        ends_s = table.ends_s(
            work_s + time_s, np.maximum(longest_s, time_s), tokens + lengths[sequence, None]
        )
        chosen = ends_s.argmin(axis=1)
        pipeline_of[rows, sequence] = chosen
        chosen_s = time_s[rows, chosen]
        work_s[rows, chosen] += chosen_s
        tokens[rows, chosen] += lengths[sequence]
        longest_s[rows, chosen] = np.maximum(longest_s[rows, chosen], chosen_s)
    return pipeline_of, table.ends_s(work_s, longest_s, tokens).max(axis=1)


class _Loads:
    """The loads of a dispatch's pipelines, and when these end after an exchange of sequences.

    Each pipeline has one additional sequence without tokens: to exchange for it is to give.
    """

    def __init__(self, pipeline_of: IntArray, lengths: IntArray, table: CostTable) -> None:
        count = len(table.c)
        self.owners = np.append(pipeline_of, np.arange(count))
        self._table = table
        self._sizes = np.append(lengths, np.zeros(count, dtype=np.int64))
        self._times_s = np.vstack([table.fitting_times_s(lengths), np.zeros((count, count))])
        held_s = self._times_s * (self.owners[:, None] == np.arange(count))
        self._work_s = held_s.sum(axis=0)
        self._tokens = np.bincount(self.owners, self._sizes, count).astype(np.float64)
        second_s, first_s = np.partition(held_s, -2, axis=0)[-2:]
        self._own_s = held_s.max(axis=1)
        is_longest = self._own_s == first_s[self.owners]
        self._longest_beside_s = np.where(is_longest, second_s[self.owners], first_s[self.owners])
        self.ends_s = table.ends_s(self._work_s, first_s, self._tokens)

    def ends_after_s(self, pipelines: Any, gone: IntArray, come: IntArray) -> FloatArray:
        """Return when pipelines end without one of their sequences and with another's."""
        come_s = self._times_s[come, pipelines]
        return self._table.at(pipelines).ends_s(
            self._work_s[pipelines] - self._own_s[gone] + come_s,
            np.maximum(self._longest_beside_s[gone], come_s),
            self._tokens[pipelines] - self._sizes[gone] + self._sizes[come],
        )


def _improve(pipeline_of: IntArray, lengths: IntArray, table: CostTable) -> tuple[IntArray, float]:
    """Return a dispatch that no step improves any more, and when its last pipeline ends.

    A step gives one sequence of the pipeline that ends last to another pipeline, in exchange for
    one of its sequences or for none. The best step is taken as long as both then end earlier.
    """
    pipeline_of, num_cells = pipeline_of.copy(), 0
    while True:
        loads = _Loads(pipeline_of, lengths, table)
        last = int(loads.ends_s.argmax())
        end_s = float(loads.ends_s[last])
        given = np.flatnonzero(pipeline_of == last)[:, None]
        taken = np.flatnonzero(loads.owners != last)
        num_cells += len(given) * len(taken) + len(lengths) * len(table.c)
        if not len(taken) or num_cells > _MAX_STEP_CELLS:
            return pipeline_of, end_s
        others = loads.owners[taken]
        later_s = np.maximum(
            loads.ends_after_s(last, given, taken), loads.ends_after_s(others, taken, given)
        )
        row, column = np.unravel_index(int(later_s.argmin()), later_s.shape)
        if later_s[row, column] >= end_s * (1 - _LEAST_GAIN):
            return pipeline_of, end_s
        pipeline_of[given[row, 0]] = others[column]
        if taken[column] < len(lengths):
            pipeline_of[taken[column]] = last


def latency_bound_s(lengths: IntArray, table: CostTable) -> float:
    """Return a lower bound of the latency of any dispatch; infinite if a sequence doesn't fit.

    The larger of two. One is the longest time of a sequence that has its quickest pipeline to
    itself. The other is an area: for any prices u_j that sum to 1 over the pipelines, the work of
    all sequences, each on its cheapest pipeline, `Σ_i min_j u_j·T_j(l_i)`, is at most the latency.
    """
    if not len(lengths):
        return 0.0
    times_s, fits = table.times_s(lengths), lengths[:, None] <= table.max_len
    alone_s = np.where(fits, table.alone_s(lengths), np.inf).min(axis=1).max()
    # At these prices, all sequences together cost the same on every pipeline that can hold them.
    totals_s = np.where(fits, times_s, 0.0).sum(axis=0)
    prices = 1.0 / np.where(totals_s > 0, totals_s, np.inf)
    area_s = np.where(fits, prices / prices.sum() * times_s, np.inf).min(axis=1).sum()
    return float(max(alone_s, area_s))
