"""Pack a pipeline's sequences into micro-batches (Hydraulis §6.1, Eq. 1, Appendix C).

Minimise `(max_j Σ_{i in j} T(l_i) + c)·(PP - 1 + V)` over the number V of micro-batches and their
contents, with at most MaxLen tokens in each. V runs from `⌈Σl / MaxLen⌉` to `Σl / UtilLen`, at
least to `2·⌈Σl / min(MaxLen, KeptLen)⌉ - 1`, with which any order of filling stays below these
lengths, and at most to the number of sequences. Up to eight sequences are packed exactly, by trying
every partition. More are spread longest first and improved by swaps, for all V and all pipelines of
the iteration at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.assign.bins import BinRows, balance, improve_balance
from lightning_hetero.assign.pipeline_cost import (
    CostTable,
    PipelineCost,
    as_lengths,
    sequence_times_s,
    stretch,
)
from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.core.errors import AssignmentError

__all__ = [
    "Packing",
    "microbatch_range",
    "pack_all",
    "packing_lower_bound_s",
    "partition_sums",
    "partitions",
]

_MAX_ENUMERATED = 8
"""Most sequences whose partitions are all tried: 8·8·4,140 = 265,000 multiply-adds, under a
millisecond, while an integer programme takes several."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """One pipeline's micro-batches and the time they take."""

    microbatches: tuple[tuple[int, ...], ...]
    """For each micro-batch the indices of its sequences; none is empty."""
    latency_s: float
    """Eq. 1 with c; 0 for a pipeline without sequences."""
    lower_bound_s: float
    """No packing with a number of micro-batches in `microbatch_range` has a smaller latency."""


@dataclass(kw_only=True)
class _Problem:
    """One pipeline's sequences, longest first, and the best packing so far."""

    cost: PipelineCost
    order: IntArray
    """Indices of the caller's sequences, longest first."""
    lengths: IntArray
    times_s: FloatArray
    counts: IntArray
    """Numbers of micro-batches that are tried."""
    row_bounds_s: FloatArray
    """Lower bound of Eq. 1 for each of these numbers."""
    bin_of: IntArray
    latency_s: float = float("inf")

    @property
    def bound_s(self) -> float:
        return float(self.row_bounds_s.min())

    def offer(self, bin_of: IntArray) -> None:
        """Keep a packing, the micro-batch of each sequence, if it is the best so far."""
        used, bins = np.unique(bin_of, return_inverse=True)
        loads_s = np.bincount(bins, weights=self.times_s)
        tokens = np.bincount(bins, weights=self.lengths)
        fullest_s = float((loads_s * self.cost.stretch(tokens)).max())
        latency_s = self.cost.latency_s(fullest_s, len(used))
        if latency_s < self.latency_s:
            self.bin_of, self.latency_s = bins, latency_s

    def packing(self) -> Packing:
        """Return the best packing, with the longest micro-batch first."""
        loads_s = np.bincount(self.bin_of, weights=self.times_s)
        batches = tuple(
            tuple(sorted(self.order[self.bin_of == batch].tolist()))
            for batch in np.argsort(-loads_s, kind="stable")
        )
        return Packing(
            microbatches=batches,
            latency_s=self.latency_s,
            lower_bound_s=min(self.bound_s, self.latency_s),
        )


def pack_all(lengths: Sequence[ArrayLike], costs: Sequence[PipelineCost]) -> tuple[Packing, ...]:
    """Return the best packing found for each pipeline's sequences; all are packed together.

    Args:
        lengths: For each pipeline the tokens of its sequences.
        costs: The pipelines.

    Raises:
        AssignmentError: A sequence is longer than its pipeline's MaxLen.
    """
    problems = [_problem(item, cost) for item, cost in zip(lengths, costs, strict=True)]
    work = [problem for problem in problems if problem is not None]
    for problem in work:
        if problem.counts[0] == 1:
            problem.offer(np.zeros(len(problem.order), dtype=np.int64))
    rest = [problem for problem in work if problem.latency_s > problem.bound_s * (1 + 1e-9)]
    _enumerate_small([p for p in rest if len(p.order) <= _MAX_ENUMERATED])
    _spread_large([p for p in rest if len(p.order) > _MAX_ENUMERATED])
    empty = Packing(microbatches=(), latency_s=0.0, lower_bound_s=0.0)
    return tuple(empty if problem is None else problem.packing() for problem in problems)


def microbatch_range(lengths: IntArray, cost: PipelineCost) -> range:
    """Return the numbers of micro-batches that are tried (Appendix C)."""
    total, count = int(lengths.sum()), len(lengths)
    fewest = max(1, -(-total // cost.max_len))
    fewest_kept = max(1, -(-total // min(cost.max_len, cost.kept_len)))
    most = max(total // cost.util_len, 2 * fewest_kept - 1)
    return range(fewest, min(most, count) + 1)


def packing_lower_bound_s(times_s: FloatArray, num_microbatches: int) -> float:
    """Return a lower bound of the longest of V micro-batches, without c.

    The largest of: the mean, the longest sequence, and for each k the k + 1 shortest of the kV + 1
    longest sequences, since some micro-batch holds k + 1 of those.

    Args:
        times_s: [U] descending.
        num_microbatches: V.
    """
    count = num_microbatches
    bound_s = max(float(times_s[0]), float(times_s.sum()) / count)
    sums_s = np.concatenate([[0.0], np.cumsum(times_s)])
    ks = np.arange(1, (len(times_s) - 1) // count + 1)
    if len(ks):
        ends = ks * count + 1
        bound_s = max(bound_s, float((sums_s[ends] - sums_s[ends - ks - 1]).max()))
    return bound_s


def _problem(lengths: ArrayLike, cost: PipelineCost) -> _Problem | None:
    sizes = as_lengths(lengths)
    if not len(sizes):
        return None
    if int(sizes.max()) > cost.max_len:
        raise AssignmentError(
            f"Sequence {int(sizes.argmax())} has {int(sizes.max())} tokens but the pipeline takes "
            f"{cost.max_len}. Dispatch it to a roomier pipeline, or cut it."
        )
    order = np.argsort(-sizes, kind="stable").astype(np.int64)
    ordered = sizes[order]
    times_s = sequence_times_s(ordered, cost)
    counts = np.array(microbatch_range(ordered, cost), dtype=np.int64)
    longest_s = float(times_s[0] * cost.stretch(ordered[:1].astype(np.float64))[0])
    bounds_s = [
        cost.latency_s(max(longest_s, packing_lower_bound_s(times_s, int(v))), int(v))
        for v in counts
    ]
    return _Problem(
        cost=cost,
        order=order,
        lengths=ordered,
        times_s=times_s,
        counts=counts,
        row_bounds_s=np.array(bounds_s),
        bin_of=np.zeros(0, dtype=np.int64),
    )


def _enumerate_small(problems: list[_Problem]) -> None:
    """Pack exactly, problems of one size at a time."""
    for size in sorted({len(problem.order) for problem in problems}):
        group = [problem for problem in problems if len(problem.order) == size]
        groups, counts = partitions(size)
        lengths = np.stack([problem.lengths.astype(float) for problem in group])
        fullest_s = _partition_times_s(
            np.stack([problem.times_s for problem in group]), lengths, [p.cost for p in group]
        )
        fullest = partition_sums(lengths)
        for problem, seconds, tokens in zip(group, fullest_s, fullest, strict=True):
            cost = problem.cost
            latencies_s = (seconds + cost.c) * (cost.num_stages - 1 + counts)
            is_allowed = (tokens <= cost.max_len) & (counts >= problem.counts[0])
            is_allowed &= counts <= problem.counts[-1]
            best = int(np.where(is_allowed, latencies_s, np.inf).argmin())
            problem.offer(groups[best])
            problem.row_bounds_s = np.array([problem.latency_s])


def _spread_large(problems: list[_Problem]) -> None:
    """Pack by longest first and swaps, all numbers of micro-batches of all problems together."""
    if not problems:
        return
    for problem in problems:
        problem.offer(_first_fit(problem))
    owners, rows = _rows_of(problems)
    _offer_rows(problems, owners, rows)
    bounds_s = np.array([problems[o].row_bounds_s[v] for o, v in owners])
    hopeful = [
        index
        for index, (owner, _) in enumerate(owners)
        if rows.is_valid[index] and bounds_s[index] < problems[owner].latency_s * (1 - 1e-9)
    ]
    if not hopeful:
        return
    kept = [owners[index] for index in hopeful]
    part = rows.only(np.array(hopeful))
    stop_at_s = np.array(
        [packing_lower_bound_s(problems[o].times_s, int(problems[o].counts[v])) for o, v in kept]
    )
    _offer_rows(problems, kept, improve_balance(part, stop_at_s=stop_at_s))


def _rows_of(problems: list[_Problem]) -> tuple[list[tuple[int, int]], BinRows]:
    """Return the indices (problem, count) of each row, and the rows, spread longest first."""
    owners = [
        (index, row)
        for index, problem in enumerate(problems)
        for row in range(len(problem.counts))
        if problem.row_bounds_s[row] < problem.latency_s
    ]
    if not owners:
        owners = [(0, 0)]
    width = max(len(problem.order) for problem in problems)
    times_s, tokens = np.zeros((len(owners), width)), np.zeros((len(owners), width))
    for row, (owner, _) in enumerate(owners):
        count = len(problems[owner].order)
        times_s[row, :count] = problems[owner].times_s
        tokens[row, :count] = problems[owner].lengths
    num_bins = np.array([problems[owner].counts[row] for owner, row in owners])
    max_tokens = np.array([float(problems[owner].cost.max_len) for owner, _ in owners])
    rows = balance(times_s, tokens, num_bins, max_tokens)
    if rows.is_valid.all():
        return owners, rows
    tight = balance(times_s, tokens, num_bins, max_tokens, tightest=True)
    bin_of = np.where(rows.is_valid[:, None], rows.bin_of, tight.bin_of)
    return owners, replace(rows, bin_of=bin_of, is_valid=rows.is_valid | tight.is_valid)


def _offer_rows(problems: list[_Problem], owners: list[tuple[int, int]], rows: BinRows) -> None:
    fullest_s = rows.fullest_s()
    for row, (owner, _) in enumerate(owners):
        problem = problems[owner]
        latency_s = problem.cost.latency_s(float(fullest_s[row]), int(rows.num_bins[row]))
        if latency_s < problem.latency_s:
            problem.offer(rows.bin_of[row, : len(problem.order)])


def _first_fit(problem: _Problem) -> IntArray:
    """Return each sequence's micro-batch: the first with room, longest sequences first.

    A sequence above KeptLen is alone in its micro-batch.
    """
    usual = min(problem.cost.max_len, problem.cost.kept_len)
    room = [usual]
    bin_of = np.zeros(len(problem.lengths), dtype=np.int64)
    for index, length in enumerate(problem.lengths.tolist()):
        chosen = next((b for b, left in enumerate(room) if left >= length), len(room))
        if chosen == len(room):
            room.append(usual)
        room[chosen] -= length
        bin_of[index] = chosen
    return bin_of


@lru_cache(maxsize=_MAX_ENUMERATED + 1)
def partitions(num_items: int) -> tuple[IntArray, IntArray]:
    """Return all partitions as group indices [P, U] and their numbers of groups [P].

    Groups are numbered in the order of their first item (restricted growth strings), so no
    partition comes twice.
    """
    groups = np.zeros((1, 0), dtype=np.int64)
    counts = np.zeros(1, dtype=np.int64)
    for _ in range(num_items):
        repeats = counts + 1
        parents = np.repeat(np.arange(len(groups)), repeats)
        starts = np.cumsum(repeats) - repeats
        added = np.arange(len(parents)) - starts[parents]
        groups = np.concatenate([groups[parents], added[:, None]], axis=1)
        counts = np.maximum(counts[parents], added + 1)
    groups.setflags(write=False)
    counts.setflags(write=False)
    return groups, counts


@lru_cache(maxsize=_MAX_ENUMERATED + 1)
def _membership(num_items: int) -> FloatArray:
    """Return [groups, U, P]: 1 where an item is in the group."""
    groups, _ = partitions(num_items)
    members = groups.T[None, :, :] == np.arange(num_items)[:, None, None]
    return np.ascontiguousarray(members, dtype=np.float64)


def _partition_times_s(
    times_s: FloatArray, lengths: FloatArray, costs: Sequence[PipelineCost]
) -> FloatArray:
    """Return the longest micro-batch of every partition, [G, P], of times and lengths [G, U]."""
    if not any(cost.recompute_share for cost in costs):
        return partition_sums(times_s)
    table = CostTable.of(costs)
    kept_len, share = table.kept_len[:, None], table.recompute_share[:, None]
    longest_s = np.zeros((len(times_s), 1))
    for members in _membership(times_s.shape[1]):
        loads_s = times_s @ members * stretch(lengths @ members, kept_len, share)
        longest_s = np.maximum(longest_s, loads_s)
    return longest_s


def partition_sums(values: FloatArray) -> FloatArray:
    """Return the largest group sum of values [G, U] in every partition, [G, P]."""
    first, *others = _membership(values.shape[1])
    largest: FloatArray = values @ first
    for members in others:
        np.maximum(largest, values @ members, out=largest)
    return largest
