"""Place sequences one after another on the pipeline that then ends first (Hydraulis Algorithm 1).

`place_greedily` tries many orders at once. If there are so many sequences that a step for each
takes too long, `place_in_rounds` and `fill_to_target` place many in a step, longest first.
"""

import bisect
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_hetero.assign.pipeline_cost import UNFIT_S, CostTable, KindTimes
from lightning_hetero.core.arrays import FloatArray, IntArray

__all__ = ["Placement", "fill_to_target", "place_greedily", "place_in_rounds"]

_ROUND_SHARE = 8
"""A round gives sequences to an eighth of the pipelines at most."""
_LEFT_SHARE = 100
"""A round places a hundredth of the sequences that are left at most."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Each row's pipelines of the sequences, and its latency."""

    pipeline_of: IntArray
    """[rows, B] pipeline of each sequence, in the sequences' own order."""
    latencies_s: FloatArray
    """[rows] largest Eq. 2 (with c) over the pipelines."""


def place_greedily(
    lengths: IntArray,
    times_s: FloatArray,
    table: CostTable,
    orders: IntArray,
    targets_s: FloatArray,
) -> Placement:
    """Give each sequence, in each row's order, to the pipeline that then ends first (Algorithm 1).

    All rows advance together, one sequence a step, so a step is a dozen NumPy calls on [rows, D]
    arrays, whatever the number of rows: 100 rows, 56 sequences and 16 pipelines are 670 calls.

    That pipeline also keeps the largest end smallest, which is Algorithm 1's rule; if several do,
    the paper takes the first of them, this function the one that ends first. A row with a target
    takes instead the pipeline of least MaxLen that still ends by the target, and so saves those of
    large MaxLen, which are expensive, for sequences that fit on no other.

    Args:
        lengths: [B] tokens of each sequence.
        times_s: [B, D] from `CostTable.fitting_times_s`.
        table: The D pipelines.
        orders: [rows, B] permutations of the sequences.
        targets_s: [rows] latencies to stay below, 0 for none; rows with targets come last.
    """
    num_rows, num_pipelines = len(orders), times_s.shape[1]
    shape = (num_rows, num_pipelines)
    work_s, longest_s, tokens = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    per_token = 1.0 / table.max_len
    fixed_s = table.c * table.num_bubbles
    rows = np.arange(num_rows)
    pipeline_of = np.empty((num_rows, len(lengths)), dtype=np.int64)
    ordered = lengths[orders].astype(np.float64)
    # Rows with targets come last. Negative keys, in order of MaxLen, sort before every time.
    targets = int((targets_s > 0).sum())
    first = num_rows - targets
    by_room = np.argsort(np.argsort(table.max_len, kind="stable"), kind="stable") - 1e6
    has_bubbles = bool(table.num_bubbles.any())
    for step in range(len(lengths)):
        time_s = times_s[orders[:, step]]
        total_s = work_s + time_s
        if has_bubbles:
            total_s += table.num_bubbles * np.maximum(longest_s, time_s)
        # The fewest micro-batches that hold the tokens: at least one, as every length is positive.
        num_microbatches = np.ceil((tokens + ordered[:, step, None]) * per_token - 1e-9)
        total_s += fixed_s + table.c * num_microbatches
        if targets:
            in_time = total_s[first:] <= targets_s[first:, None]
            total_s[first:][in_time] = np.broadcast_to(by_room, in_time.shape)[in_time]
        chosen = total_s.argmin(axis=1)
        pipeline_of[:, step] = chosen
        chosen_s = time_s[rows, chosen]
        work_s[rows, chosen] += chosen_s
        tokens[rows, chosen] += ordered[:, step]
        longest_s[rows, chosen] = np.maximum(longest_s[rows, chosen], chosen_s)
    total_s = work_s + table.num_bubbles * longest_s + fixed_s
    total_s += table.c * np.ceil(tokens * per_token - 1e-9)
    result = np.empty_like(pipeline_of)
    np.put_along_axis(result, orders, pipeline_of, axis=1)
    latencies_s = np.where(tokens > 0, total_s, 0.0).max(axis=1)
    return Placement(pipeline_of=result, latencies_s=latencies_s)


def place_in_rounds(lengths: IntArray, times: KindTimes, table: CostTable) -> Placement:
    """Place sequences longest first, in each round one on each of the pipelines that end first.

    The sequences of a round are almost equally long, so that those pipelines are the ones that
    placing them one by one would take. Rounds get smaller towards the end, where the last
    sequences level the pipelines: B sequences on D pipelines take about 8·B/D + 100·ln(D) rounds of
    a dozen NumPy calls on [D], 100,000 on 1,024 about 1,300.

    Args:
        lengths: [B] tokens of each sequence.
        times: Seconds of every sequence.
        table: The D pipelines.
    """
    num_pipelines = len(table.c)
    work_s, longest_s, tokens = (np.zeros(num_pipelines) for _ in range(3))
    order = np.argsort(-lengths, kind="stable")
    pipeline_of = np.empty(len(lengths), dtype=np.int64)
    done = 0
    while done < len(lengths):
        time_s = times.of(order[done : done + 1], slice(None))
        ends_s = table.ends_s(
            work_s + time_s, np.maximum(longest_s, time_s), tokens + lengths[order[done]]
        )
        left = len(lengths) - done
        width = max(1, min(num_pipelines // _ROUND_SHARE, left // _LEFT_SHARE))
        chosen = np.argsort(ends_s, kind="stable")[:width]
        chosen = chosen[time_s[chosen] < UNFIT_S]
        members = order[done : done + len(chosen)]
        pipeline_of[members] = chosen
        own_s = times.of(members, chosen)
        work_s[chosen] += own_s
        longest_s[chosen] = np.maximum(longest_s[chosen], own_s)
        tokens[chosen] += lengths[members]
        done += len(chosen)
    latency_s = table.ends_s(work_s, longest_s, tokens)[tokens > 0].max()
    return Placement(pipeline_of=pipeline_of[None], latencies_s=np.array([latency_s]))


class _Taking(NamedTuple):
    """A pipeline that takes the sequences of an order from the next one up to some `last` one."""

    table: CostTable
    pipeline: int
    work_s: float
    """Seconds of the sequences that it has, less `done_s` of the last one before the next."""
    longest_s: float
    """Seconds of the longest sequence that it has or takes."""
    tokens: float
    """Tokens, counted like `work_s`."""
    done_s: FloatArray
    """Sum of the seconds on this pipeline up to each sequence of the order."""
    done_tokens: IntArray
    """Sum of the tokens up to each sequence of the order."""

    def load(self, last: int) -> tuple[float, float]:
        """Return its seconds and tokens if it takes the sequences up to `last`."""
        return self.work_s + self.done_s[last], self.tokens + self.done_tokens[last]

    def end_s(self, last: int) -> float:
        """Return the second at which it then ends."""
        work_s, tokens = self.load(last)
        table, index = self.table, self.pipeline
        bubbles, count = table.num_bubbles[index], math.ceil(tokens / table.max_len[index] - 1e-9)
        return float(work_s + bubbles * self.longest_s + table.c[index] * (bubbles + count))


def fill_to_target(
    lengths: IntArray, times: KindTimes, table: CostTable, target_s: float
) -> Placement | None:
    """Place sequences longest first on the pipeline of least MaxLen that still ends by a target.

    A pipeline gets as many at once as it has time for, so D pipelines take a few times D steps,
    whatever the number of sequences. Returns None if no pipeline has time for some sequence.

    Args:
        lengths: [B] tokens of each sequence.
        times: Seconds of every sequence.
        table: The D pipelines.
        target_s: Latency by which all pipelines end.
    """
    order = np.argsort(-lengths, kind="stable")
    by_kind = times.by_kind[order]
    # The last row is 0: the sum before the first sequence.
    done_s = np.zeros((len(lengths) + 1, by_kind.shape[1]))
    np.cumsum(np.where(by_kind < UNFIT_S, by_kind, 0.0), axis=0, out=done_s[:-1])
    done_tokens = np.append(np.cumsum(lengths[order]), 0)
    by_room = np.argsort(np.argsort(table.max_len, kind="stable"), kind="stable")
    work_s, longest_s, tokens = (np.zeros(len(table.c)) for _ in range(3))
    pipeline_of = np.empty(len(lengths), dtype=np.int64)
    first = 0
    while first < len(lengths):
        time_s = by_kind[first, times.kind_of]
        longest = np.maximum(longest_s, time_s)
        ends_s = table.ends_s(work_s + time_s, longest, tokens + lengths[order[first]])
        chosen = int(np.where(ends_s <= target_s, by_room, len(by_room)).argmin())
        if ends_s[chosen] > target_s:
            return None
        kind = times.kind_of[chosen]
        before = first - 1 if first else len(lengths)
        taking = _Taking(
            table=table,
            pipeline=chosen,
            work_s=work_s[chosen] - done_s[before, kind],
            longest_s=longest[chosen],
            tokens=tokens[chosen] - done_tokens[before],
            done_s=done_s[:, kind],
            done_tokens=done_tokens,
        )
        every = range(len(lengths))
        stop = bisect.bisect_right(every, target_s, first + 1, key=taking.end_s)
        pipeline_of[order[first:stop]] = chosen
        work_s[chosen], tokens[chosen] = taking.load(stop - 1)
        longest_s[chosen] = longest[chosen]
        first = stop
    latency_s = table.ends_s(work_s, longest_s, tokens).max()
    return Placement(pipeline_of=pipeline_of[None], latencies_s=np.array([latency_s]))
