"""Estimate many plans on many iterations at once, to choose among proposals.

Every row is one iteration on one plan. Sequences are dispatched longest first, to the least loaded
pipeline of the scheme that then ends first. Equal pipelines differ only in their load, so a step
compares one pipeline of each of K schemes, then finds the chosen scheme's least loaded pipeline: 25
NumPy calls on [rows, K] and 2 on [rows, most pipelines of a scheme]. The schedule is then estimated
as if a pipeline's work could be cut evenly into V micro-batches no shorter than its longest
sequence: for the V just below and just above work / longest.
"""

from collections.abc import Sequence

import numpy as np

from lightning_hetero.assign.pipeline_cost import UNFIT_S, CostTable, PipelineCost
from lightning_hetero.core.arrays import FloatArray, IntArray

__all__ = ["estimate_plans"]

_BLOCK_CELLS = 200_000


def estimate_plans(
    iterations: Sequence[IntArray], counts: IntArray, costs: Sequence[PipelineCost]
) -> FloatArray:
    """Return estimated seconds [plans, iterations], infinite where a sequence doesn't fit.

    Args:
        iterations: Lengths of each iteration's sequences.
        counts: [plans, K] pipelines of each scheme.
        costs: The K schemes.
    """
    used = np.flatnonzero(counts.any(axis=0))
    counts, table = counts[:, used], CostTable.of([costs[k] for k in used.tolist()])
    width = max(len(item) for item in iterations)
    lengths = np.zeros((len(iterations), width))
    for row, item in enumerate(iterations):
        lengths[row, : len(item)] = np.sort(item)[::-1]
    plans, samples = np.divmod(np.arange(len(counts) * len(iterations)), len(iterations))
    block = max(1, _BLOCK_CELLS // int(counts.max() * counts.shape[1]))
    parts = [
        _Rows(counts[plans[start : start + block]], table).run(
            lengths[samples[start : start + block]]
        )
        for start in range(0, len(plans), block)
    ]
    return np.concatenate(parts).reshape(len(counts), len(iterations))


class _Rows:
    """Loads of each scheme's pipelines, and of the least loaded one of each scheme.

    A load is (work, longest, tokens). Loads are kept in flat rows [R·K·D, 3] and [R·K, 3], so that
    a pipeline's load is read and written at once.
    """

    def __init__(self, counts: IntArray, table: CostTable) -> None:
        self.shape = (*counts.shape, int(counts.max()))
        exists = np.arange(self.shape[2]) < counts[:, :, None]
        self.table = table
        self.loads = np.zeros((exists.size, 3))
        self.loads[~exists.ravel(), 0] = UNFIT_S
        self.keys_s = self.loads[:, 0].reshape(-1, self.shape[2]).copy()
        self.least = np.zeros(counts.size, dtype=np.int64)
        self.least_loads = self.loads[:: self.shape[2]].copy()
        self.rows = np.arange(self.shape[0])
        self.is_unfit = np.zeros(self.shape[0], dtype=bool)

    def run(self, lengths: FloatArray) -> FloatArray:
        """Dispatch lengths [R, B], descending, 0 for none; return the estimated seconds [R]."""
        for column in np.ascontiguousarray(lengths.T):
            self._place(column)
        return np.where(self.is_unfit, np.inf, self._packed_s())

    def _place(self, lengths: FloatArray) -> None:
        table, length = self.table, lengths[:, None]
        work_s, longest_s, tokens = np.moveaxis(self.least_loads.reshape(*self.shape[:2], 3), 2, 0)
        time_s = table.times_s(lengths)
        total_s = work_s + time_s + table.num_bubbles * np.maximum(longest_s, time_s)
        num_microbatches = np.maximum((tokens + length) / table.max_len, 1.0)
        total_s += table.c * (table.num_bubbles + num_microbatches)
        total_s[length > table.max_len] = UNFIT_S
        kind = total_s.argmin(axis=1)
        best_s = total_s[self.rows, kind]
        self.is_unfit |= best_s >= UNFIT_S
        # A row without a sequence left must keep its loads and keys.
        rows = self.rows[lengths > 0]
        place = rows * self.shape[1] + kind[rows]
        chosen_s = time_s[rows, kind[rows]]
        load = self.least_loads[place]
        load[:, 0] += chosen_s
        load[:, 1] = np.maximum(load[:, 1], chosen_s)
        load[:, 2] += lengths[rows]
        cell = self.least[place]
        self.loads[place * self.shape[2] + cell] = load
        self.keys_s[place, cell] = best_s[rows]
        cell = self.keys_s[place].argmin(axis=1)
        self.least[place] = cell
        self.least_loads[place] = self.loads[place * self.shape[2] + cell]

    def _packed_s(self) -> FloatArray:
        """Return the seconds [R] of work cut evenly, by the better V next to work / longest."""
        row_of, kind_of, _ = np.unravel_index(np.flatnonzero(self.loads[:, 2]), self.shape)
        work_s, longest_s, tokens = self.loads[self.loads[:, 2] > 0].T
        table = self.table
        bubbles, constant_s = table.num_bubbles[kind_of], table.c[kind_of]
        fewest = np.ceil(tokens / table.max_len[kind_of])
        ratio = work_s / longest_s
        latencies_s = [
            work_s
            + bubbles * np.maximum(longest_s, work_s / count)
            + constant_s * (bubbles + count)
            for count in (np.maximum(np.floor(ratio), fewest), np.maximum(np.ceil(ratio), fewest))
        ]
        result = np.zeros(self.shape[0])
        np.maximum.at(result, row_of, np.minimum(*latencies_s))
        return result
