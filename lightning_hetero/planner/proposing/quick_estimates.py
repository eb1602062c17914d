"""Estimate many plans on many iterations at once, to choose among proposals.

In the arrays here, a row is one iteration on one plan. A plan has n pipelines of each of K schemes.
The sequences of an iteration are assigned one after another, the longest first: each goes to the
scheme whose pipelines then end soonest.

Suppose that the pipelines of a scheme have N sequences, which take t_1 ≥ t_2 ≥ … ≥ t_N seconds. The
mean pipeline works for Σt / n seconds. Of the first q sequences, some pipeline has ⌈q / n⌉ or more,
each of which takes t_q or more. So the last of the pipelines works for at least ::

    max(Σt / n, max_q t_q·⌈q / n⌉)

seconds. A pipeline of S stages waits for S - 1 more micro-batches. The estimate assumes V equal
micro-batches, which must be as long as the longest sequence: it tries the largest V for which they
are, and the next one. Each step is some twenty NumPy calls on arrays of [rows, K].
"""

from collections.abc import Sequence

import numpy as np

from lightning_hetero.assign.pipeline_cost import CostTable, PipelineCost
from lightning_hetero.core.arrays import FloatArray, IntArray


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
    table = CostTable.of([costs[k] for k in used.tolist()])
    lengths = np.zeros((len(iterations), max(map(len, iterations))))
    for row, item in enumerate(iterations):
        lengths[row, : len(item)] = np.sort(item)[::-1]
    exists = np.repeat(counts[:, used] > 0, len(iterations), axis=0)
    pipelines = np.maximum(np.repeat(counts[:, used], len(iterations), axis=0), 1)
    columns = np.tile(lengths, (len(counts), 1)).T
    rows, bubbles = np.arange(len(pipelines)), table.num_bubbles
    work_s, least_s, longest_s, given, tokens = np.zeros((5, *pipelines.shape))
    is_unfit = np.zeros(len(rows), dtype=bool)
    for length in np.ascontiguousarray(columns):
        time_s, more = table.times_s(length), tokens + length[:, None]
        each_s = np.maximum(
            (work_s + time_s) / pipelines,
            np.maximum(least_s, time_s * np.ceil((given + 1) / pipelines)),
        )
        end_s = each_s + bubbles * np.maximum(longest_s, time_s)
        end_s += table.c * (bubbles + np.maximum(more / (pipelines * table.max_len), 1.0))
        end_s[~exists | (length[:, None] > table.max_len)] = np.inf
        scheme = end_s.argmin(axis=1)
        is_unfit |= np.isinf(end_s[rows, scheme])
        # Rows without a sequence left keep what they have.
        at = rows[length > 0], scheme[length > 0]
        least_s[at] = np.maximum(least_s[at], time_s[at] * np.ceil((given[at] + 1) / pipelines[at]))
        longest_s[at] = np.maximum(longest_s[at], time_s[at])
        work_s[at] += time_s[at]
        given[at] += 1
        tokens[at] = more[at]
    each_s = np.maximum(work_s / pipelines, least_s)
    fewest = np.maximum(np.ceil(tokens / (pipelines * table.max_len)), 1.0)
    ratio = each_s / np.where(given > 0, longest_s, 1.0)
    ends_s = [
        each_s + bubbles * np.maximum(longest_s, each_s / number) + table.c * (bubbles + number)
        for number in (np.maximum(np.floor(ratio), fewest), np.maximum(np.ceil(ratio), fewest))
    ]
    found_s = np.where(given > 0, np.minimum(*ends_s), 0.0).max(axis=1)
    return np.where(is_unfit, np.inf, found_s).reshape(len(counts), len(iterations))
