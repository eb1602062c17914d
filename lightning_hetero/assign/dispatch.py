"""Decide which pipeline gets which sequence (Hydraulis §6.2, Eq. 3, Algorithm 1).

It minimises, over all pipelines, the largest lower bound of a pipeline's latency,
`Σ T(l_i) + T(longest)·(PP - 1) + c·(PP - 1 + V)` with the fewest micro-batches V that hold its
tokens. Many orders are tried at once, each greedily: longest first, the same with noise of several
strengths on the lengths, and plain shuffles as in the paper. The best few are then improved by
moves and swaps. Noisy orders matter: on real lengths the best of 100 plain shuffles ends up to 60 %
later than longest first, and mild noise a few per cent earlier. A few linear programmes give a
lower bound of any dispatch's latency (`covering`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.assign.covering import (
    ROUNDING,
    SequenceRuns,
    StageSeconds,
    add_cover,
    least_possible_s,
)
from lightning_hetero.assign.dispatch_greedy import (
    Placement,
    fill_to_target,
    place_greedily,
    place_in_rounds,
)
from lightning_hetero.assign.dispatch_moves import improve_dispatch
from lightning_hetero.assign.linear_program import LinearProgram
from lightning_hetero.assign.pipeline_cost import (
    UNFIT_S,
    CostTable,
    KindTimes,
    PipelineCost,
    as_lengths,
)
from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.core.errors import AssignmentError

__all__ = ["Dispatch", "check_fit", "dispatch", "dispatch_lower_bound_s", "fast_lower_bound_s"]


def dispatch_lower_bound_s(
    runs: SequenceRuns,
    counts: Sequence[int],
    *,
    lower_bound_s: float,
    upper_bound_s: float,
    precision: float = 1e-3,
) -> float:
    """Return a lower bound near the optimum of Eq. 3, by bisection over a linear relaxation.

    A pipeline of latency x whose longest sequence is h has `x - (PP-1)·(T(h) + c)` seconds for its
    micro-batches. Every dispatch of latency x is a cover (`covering`) by the plan's pipelines, so x
    is a lower bound if every cover needs more pipelines of some kind than the plan has.

    Args:
        runs: The sequences, on every kind of pipeline.
        counts: Pipelines of each kind.
        lower_bound_s: A known lower bound.
        upper_bound_s: Latency of a known dispatch.
        precision: Relative width at which the bisection ends.
    """
    lost_s = runs.table.num_bubbles * (runs.table.times_s(runs.least) + runs.table.c)

    def is_possible(latency_s: float) -> bool:
        program = LinearProgram()
        slots_s = latency_s - lost_s
        seconds = StageSeconds(slots=slots_s, room=slots_s - runs.table.c)
        opened = add_cover(program, runs, seconds)
        if opened is None:
            return False
        (share,) = program.add_variables(upper=np.inf, cost=1.0)
        for columns, count in zip(opened.T, counts, strict=True):
            program.add_row([*columns, share], [*np.ones(len(columns)), -float(count)], upper=0.0)
        return program.minimize().lower_bound <= 1 + ROUNDING

    low_s = min(lower_bound_s, upper_bound_s)
    return least_possible_s(is_possible, low_s, upper_bound_s, precision)


_NOISES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 100.0)  # So much noise as the last is a plain shuffle.
_MAX_GREEDY_STEPS = 4000  # Most sequences placed one by one, 25 to 50 µs each.
_NUM_BULK_TARGETS = 8
_MAX_BULK_STEPS = 4000  # Most targets x pipelines, with two targets at least.
_MAX_CELLS = 2e7  # Most rows x sequences x pipelines: about 0.15 s on one core.
_MAX_IMPROVE_CELLS = 2e6  # Most rows x sequences x pipelines improved.
_IMPROVE_BUDGET = 10_000_000  # Moves and swaps considered: about a third of a second.
_NUM_IMPROVED = 8
_NUM_TARGETS = 24
_NUM_PRICE_STEPS = 40
_MAX_PRICED_CELLS = 1e8  # Most price steps x sequences x kinds.
# The tighter bound: about 8 linear programmes of 3 rows a cell, 20 ms with the most cells.
_MAX_BOUND_CELLS = 48  # Most runs of sequences x kinds.
_BOUND_SPREAD = 0.3
_BOUND_PRECISION = 3e-3


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """The pipeline of each sequence, and the time at which the last pipeline ends."""

    pipeline_of: tuple[int, ...]
    """Index of the pipeline of each sequence."""
    latency_s: float
    """Largest Eq. 2 (with c) over the pipelines."""
    lower_bound_s: float
    """No dispatch of these sequences has a smaller latency."""


def dispatch(
    lengths: ArrayLike,
    pipelines: Sequence[PipelineCost],
    num_trials: int = 100,
    seed: int = 0,
    *,
    tight_bound: bool = True,
) -> Dispatch:
    """Return the best dispatch found; the same one for the same arguments.

    Up to 4,000 sequences it is never worse than longest-first (LPT), which is one of the trials. Of
    more sequences, many are placed in a step (`place_in_rounds`, `fill_to_target`). Fewer than
    `num_trials` orders are tried if these would take more than a fraction of a second (thousands of
    sequences on hundreds of pipelines). Budgets count steps, so the same arguments give the same
    answer on every machine. With `tight_bound` linear programmes give the bound, if they take about
    20 ms: with few kinds of pipelines, and lengths that aren't spread widely.

    Raises:
        AssignmentError: A sequence fits into no pipeline.
    """
    sizes = as_lengths(lengths)
    table = CostTable.of(pipelines)
    check_fit(sizes, table)
    if not len(sizes):
        return Dispatch(pipeline_of=(), latency_s=0.0, lower_bound_s=0.0)
    # Equal pipelines share a column: K kinds instead of D pipelines.
    kinds = list(dict.fromkeys(pipelines))
    kind_of = np.array([kinds.index(pipeline) for pipeline in pipelines])
    kind_times_s = CostTable.of(kinds).fitting_times_s(sizes)
    bound_s = _lower_bound_s(sizes, kind_times_s, CostTable.of(kinds), np.bincount(kind_of))
    times = KindTimes(by_kind=kind_times_s, kind_of=kind_of)
    cells = len(sizes) * len(pipelines)
    if len(sizes) > _MAX_GREEDY_STEPS:
        placement = _placed_in_bulk(sizes, times, table, bound_s)
    else:
        num_rows = max(1, min(num_trials, int(_MAX_CELLS / cells)))
        orders = _orders(sizes, num_rows, seed)
        placement = _placed_in_orders(sizes, kind_times_s[:, kind_of], table, orders, bound_s)
    ranking = np.argsort(placement.latencies_s, kind="stable")
    best_of, best_s = placement.pipeline_of[ranking[0]], float(placement.latencies_s[ranking[0]])
    num_improved = max(1, min(_NUM_IMPROVED, int(_MAX_IMPROVE_CELLS / cells)))
    for row in ranking[:num_improved]:
        if best_s <= bound_s * (1 + 1e-9):
            break
        improved_of, improved_s = improve_dispatch(
            sizes,
            times,
            table,
            placement.pipeline_of[row],
            stop_at_s=bound_s,
            budget=_IMPROVE_BUDGET // num_improved,
        )
        if improved_s < best_s:
            best_of, best_s = improved_of, improved_s
    if tight_bound and best_s > bound_s * (1 + _BOUND_PRECISION):
        bound_s = _tight_bound_s(sizes, kinds, np.bincount(kind_of).tolist(), (bound_s, best_s))
    return Dispatch(
        pipeline_of=tuple(best_of.tolist()), latency_s=best_s, lower_bound_s=min(bound_s, best_s)
    )


def _placed_in_orders(
    sizes: IntArray, times_s: FloatArray, table: CostTable, orders: IntArray, bound_s: float
) -> Placement:
    """Place sequences in several orders and up to targets; only in the first if it is optimal."""
    num_rows = len(orders)
    placement = place_greedily(sizes, times_s, table, orders[:1], np.zeros(1))
    # One long sequence often decides the iteration, and longest first is optimal already.
    if num_rows > 1 and placement.latencies_s[0] > bound_s * (1 + 1e-9):
        placement = place_greedily(sizes, times_s, table, orders, np.zeros(num_rows))
        placement = _with_targets(sizes, times_s, table, placement, bound_s)
    return placement


def _placed_in_bulk(
    sizes: IntArray, times: KindTimes, table: CostTable, bound_s: float
) -> Placement:
    """Place very many sequences: in rounds, then by bisection to the least target that is met."""
    best = place_in_rounds(sizes, times, table)
    for _ in range(max(2, min(_NUM_BULK_TARGETS, _MAX_BULK_STEPS // len(table.c)))):
        target_s = (bound_s + float(best.latencies_s[0])) / 2
        filled = fill_to_target(sizes, times, table, target_s)
        if filled is None:
            bound_s = target_s
        else:
            best = filled
    return best


def _tight_bound_s(
    sizes: IntArray,
    kinds: Sequence[PipelineCost],
    counts: Sequence[int],
    between_s: tuple[float, float],
) -> float:
    """Return the best bound between two latencies; the lower one if finding it takes too long."""
    runs = SequenceRuns.of(sizes, CostTable.of(kinds), spread=_BOUND_SPREAD)
    if len(runs.least) * len(kinds) > _MAX_BOUND_CELLS:
        return between_s[0]
    return dispatch_lower_bound_s(
        runs,
        counts,
        lower_bound_s=between_s[0],
        upper_bound_s=between_s[1],
        precision=_BOUND_PRECISION,
    )


def _with_targets(
    lengths: IntArray,
    times_s: FloatArray,
    table: CostTable,
    placement: Placement,
    bound_s: float,
) -> Placement:
    """Add rows that fill pipelines up to targets between the bound and the best latency."""
    least_s = float(placement.latencies_s.min())
    if least_s <= bound_s * (1 + 1e-9) or len(placement.latencies_s) == 1:
        return placement
    targets_s = bound_s + (least_s - bound_s) * np.linspace(0.0, 1.0, _NUM_TARGETS)
    orders = np.broadcast_to(np.argsort(-lengths, kind="stable"), (_NUM_TARGETS, len(lengths)))
    filled = place_greedily(lengths, times_s, table, orders.astype(np.int64), targets_s)
    return Placement(
        pipeline_of=np.concatenate([placement.pipeline_of, filled.pipeline_of]),
        latencies_s=np.concatenate([placement.latencies_s, filled.latencies_s]),
    )


def check_fit(lengths: IntArray, table: CostTable) -> None:
    """Raise AssignmentError unless every sequence fits into some pipeline."""
    limit = int(table.max_len.max())
    if len(lengths) and int(lengths.max()) > limit:
        index = int(lengths.argmax())
        raise AssignmentError(
            f"Sequence {index} has {int(lengths[index])} tokens but the roomiest of "
            f"{len(table.max_len)} pipelines takes {limit}. Cut or split sequences at {limit} "
            "tokens, or add a plan with more memory per token (more tensor parallelism or stages)."
        )


def _orders(lengths: IntArray, num_rows: int, seed: int) -> IntArray:
    """Return [rows, B] orders: longest first, then ever noisier ones."""
    generator = np.random.default_rng(seed)
    noises = np.zeros(num_rows)
    noises[1:] = np.resize(np.array(_NOISES), num_rows - 1)
    keys = np.log(lengths) + noises[:, None] * generator.standard_normal((num_rows, len(lengths)))
    return np.argsort(-keys, axis=1, kind="stable").astype(np.int64)


def fast_lower_bound_s(lengths: IntArray, times_s: FloatArray, table: CostTable) -> float:
    """Return the larger of two lower bounds of the latency of any dispatch.

    One is the longest time of a sequence that has its quickest pipeline to itself. The other is an
    area: for any prices u_j that sum to 1 over the pipelines, the work of all sequences, each on
    its cheapest pipeline, `Σ_i min_j u_j·T_j(l_i)`, is at most `Σ_j u_j·max(0, latency - k_j)`,
    where `k_j = c_j·PP_j + (PP_j - 1)·T_j(shortest)` is the least loss of a pipeline in use.
    """
    if not len(lengths):
        return 0.0
    return _lower_bound_s(lengths, times_s, table, np.ones(len(table.c), dtype=np.int64))


def _lower_bound_s(
    lengths: IntArray, times_s: FloatArray, table: CostTable, counts: IntArray
) -> float:
    """Return `fast_lower_bound_s` for the number of pipelines of each kind in the table."""
    alone_s = np.where(times_s < UNFIT_S, table.alone_s(lengths), np.inf)
    single_s = float(alone_s.min(axis=1).max())
    shortest = int(lengths.min())
    return max(single_s, _area_bound_s(times_s, table.lost_s(np.array(shortest)), counts))


def _area_bound_s(kind_times_s: FloatArray, kind_lost_s: FloatArray, counts: IntArray) -> float:
    """Return the best area bound found while prices of overloaded kinds of pipelines rise."""
    # At first, all sequences together cost the same on every kind that can hold them.
    prices = 1.0 / np.where(kind_times_s < UNFIT_S, kind_times_s, 0.0).sum(axis=0).clip(1e-30)
    best_s = 0.0
    num_steps = max(1, min(_NUM_PRICE_STEPS, int(_MAX_PRICED_CELLS / kind_times_s.size)))
    for step in range(num_steps):
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
