"""Exact dispatching and packing by HiGHS, for gaps that remain, tests and benchmarks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.assign.covering import SequenceRuns
from lightning_hetero.assign.dispatch import Dispatch, check_fit, dispatch_lower_bound_s
from lightning_hetero.assign.linear_program import LinearProgram
from lightning_hetero.assign.pipeline_cost import (
    CostTable,
    PipelineCost,
    as_lengths,
    sequence_times_s,
)
from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.core.errors import AssignmentError

__all__ = ["BinPacking", "dispatch_exact", "latencies_s", "pack_into"]


@dataclass(frozen=True, kw_only=True)
class BinPacking:
    """The sequences' micro-batches for a given number of them."""

    bin_of: IntArray | None
    """Micro-batch of each sequence, or None if the solver found nothing better in time."""
    lower_bound_s: float
    """Proven lower bound of the longest micro-batch, without c; infinite if none is shorter."""


def fine_bound_s(
    lengths: ArrayLike, pipelines: Sequence[PipelineCost], upper_bound_s: float
) -> float:
    """Return the package's bound of a dispatch with fine runs, however long it takes."""
    kinds = list(dict.fromkeys(pipelines))
    return dispatch_lower_bound_s(
        SequenceRuns.of(as_lengths(lengths), CostTable.of(kinds)),
        [list(pipelines).count(kind) for kind in kinds],
        lower_bound_s=0.0,
        upper_bound_s=upper_bound_s,
    )


def dispatch_exact(
    lengths: ArrayLike, pipelines: Sequence[PipelineCost], *, time_limit_s: float = 60.0
) -> Dispatch:
    """Return the optimal dispatch (Eq. 3), or the best one in time with its proven bound.

    Minimise z over `m[i, j]` in {0, 1}, whole `v[j] >= 0`, `used[j]` in {0, 1} and `e[j] >= 0`:

    - `Σ_j m[i, j] = 1`, over the pipelines where sequence i fits;
    - `e[j] >= (PP_j - 1)·T_j(l_i)·m[i, j]` and `used[j] >= m[i, j]` for every i and j;
    - `max_len_j·v[j] >= Σ_i l_i·m[i, j]`;
    - `z >= Σ_i T_j(l_i)·m[i, j] + e[j] + c_j·((PP_j - 1)·used[j] + v[j])`.

    Raises:
        AssignmentError: A sequence fits into no pipeline, or no dispatch was found in time.
    """
    sizes = as_lengths(lengths)
    table = CostTable.of(pipelines)
    check_fit(sizes, table)
    if not len(sizes):
        return Dispatch(pipeline_of=(), latency_s=0.0, lower_bound_s=0.0)
    program, given = _dispatch_programme(sizes, table)
    solution = program.minimize(time_limit_s=time_limit_s)
    if not len(solution.values):
        raise AssignmentError(
            f"HiGHS found no dispatch of {len(sizes)} sequences to {len(pipelines)} pipelines in "
            f"{time_limit_s} s. Allow more time, or use `dispatch`."
        )
    pipeline_of = solution.values[given].argmax(axis=1)
    return Dispatch(
        pipeline_of=tuple(pipeline_of.tolist()),
        latency_s=_latency_s(sizes, table, pipeline_of),
        lower_bound_s=solution.lower_bound,
    )


def _dispatch_programme(sizes: IntArray, table: CostTable) -> tuple[LinearProgram, IntArray]:
    times_s = table.times_s(sizes)
    num_sequences, num_pipelines = times_s.shape
    fits = sizes[:, None] <= table.max_len
    program = LinearProgram()
    given = program.add_variables(upper=fits.astype(float).ravel(), integral=True)
    given = given.reshape(fits.shape)
    counts = program.add_variables(upper=np.full(num_pipelines, num_sequences), integral=True)
    used = program.add_variables(upper=np.ones(num_pipelines), integral=True)
    bubbles = program.add_variables(upper=np.full(num_pipelines, np.inf))
    (end,) = program.add_variables(upper=np.inf, cost=1.0)
    for index in range(num_sequences):
        program.add_row(given[index], 1.0, lower=1.0, upper=1.0)
    for j in range(num_pipelines):
        bubble_s = table.num_bubbles[j] * times_s[:, j]
        for index in np.flatnonzero(fits[:, j]).tolist():
            pair = [given[index, j], bubbles[j]]
            program.add_row(pair, [-bubble_s[index], 1.0], lower=0.0)
            program.add_row([given[index, j], used[j]], [-1.0, 1.0], lower=0.0)
        program.add_row(
            [*given[:, j], counts[j]], [*-sizes.astype(float), float(table.max_len[j])], lower=0.0
        )
        columns = [*given[:, j], bubbles[j], used[j], counts[j], end]
        fixed_s = table.c[j] * table.num_bubbles[j]
        program.add_row(columns, [*-times_s[:, j], -1.0, -fixed_s, -table.c[j], 1.0], lower=0.0)
    return program, given


def _latency_s(sizes: IntArray, table: CostTable, pipeline_of: IntArray) -> float:
    members = pipeline_of[:, None] == np.arange(len(table.c))
    work_s = (table.times_s(sizes) * members).sum(axis=0)
    longest = (sizes[:, None] * members).max(axis=0)
    tokens = (sizes[:, None] * members).sum(axis=0)
    return float(latencies_s(table, work_s, longest, tokens).max())


def latencies_s(
    table: CostTable, work_s: FloatArray, longest: FloatArray, tokens: FloatArray
) -> FloatArray:
    """Return Eq. 2 with c, per pipeline, from arrays that end in [D].

    `work + T(longest)·(PP-1) + c·(PP-1+V)` with the fewest micro-batches V that hold the tokens. An
    idle pipeline (no tokens) costs nothing.
    """
    num_microbatches = np.maximum(np.ceil(tokens / table.max_len), 1.0)
    bubble_s = (table.a * longest + table.b) * longest * table.num_bubbles
    total_s = work_s + bubble_s + table.c * (table.num_bubbles + num_microbatches)
    return np.where(tokens > 0, total_s, 0.0)


def pack_into(
    lengths: IntArray,
    cost: PipelineCost,
    num_microbatches: int,
    *,
    below_s: float = np.inf,
    time_limit_s: float = 60.0,
) -> BinPacking:
    """Pack into a given number V of micro-batches so that the longest is shortest (Eq. 1).

    Minimise z over `o[i, j]` in {0, 1} with `Σ_j o[i, j] = 1`, `Σ_i l_i·o[i, j] <= MaxLen` and
    `z >= Σ_i T(l_i)·o[i, j]`, only for z below `below_s`. Micro-batches are interchangeable, so the
    i-th longest sequence goes to one of the first i.

    Args:
        lengths: [U] descending.
        cost: The pipeline.
        num_microbatches: V.
        below_s: Only better packings count.
        time_limit_s: Seconds after which the best so far is returned.
    """
    times_s = sequence_times_s(lengths, cost)
    # HiGHS forgives 1e-6 of any unit, which is much of a millisecond in seconds.
    unit_s = times_s.max()
    count = len(lengths)
    program = LinearProgram()
    is_free = np.arange(num_microbatches)[None, :] <= np.arange(count)[:, None]
    chosen = program.add_variables(upper=is_free.astype(float).ravel(), integral=True)
    chosen = chosen.reshape(is_free.shape)
    (longest,) = program.add_variables(upper=below_s / unit_s * (1 - 1e-7), cost=1.0)
    for index in range(count):
        program.add_row(chosen[index], 1.0, lower=1.0, upper=1.0)
    for batch in range(num_microbatches):
        program.add_row(chosen[:, batch], lengths.astype(float), upper=float(cost.max_len))
        program.add_row([*chosen[:, batch], longest], [*times_s / unit_s, -1.0], upper=0.0)
    solution = program.minimize(time_limit_s=time_limit_s)
    bound_s = solution.lower_bound * unit_s
    if not len(solution.values):
        return BinPacking(bin_of=None, lower_bound_s=bound_s)
    return BinPacking(bin_of=solution.values[chosen].argmax(axis=1), lower_bound_s=bound_s)
