"""Linear relaxation for lower bounds of latency: sequences are covered by kinds of pipelines.

Sequences are in runs of nearly equal length, longest first; each run has the least of its lengths.
For a given latency, a pipeline of kind k whose longest sequence is of run h has `slots[h, k]`
seconds of a stage for its micro-batches, `room[h, k]` of them for sequences without constants.
Variables are shares `f[i, k]` of run i on kind k and numbers `y[h, k]` of pipelines of kind k whose
longest sequence is of run h. With n_i sequences of length l_i or more in run i, their work W_k(i),
and M_k = MaxLen, every dispatch of that latency satisfies for all i and k:

- `Σ_k f[i, k] = 1`;
- the work up to i fits, without constants and with c for every M_k tokens:
  `Σ_{h<=i} f[h, k]·W_k(h) <= Σ_{h<=i} y[h, k]·room[h, k]` and
  `Σ_{h<=i} f[h, k]·(W_k(h) + c_k·tokens(h) / M_k) <= Σ_{h<=i} y[h, k]·slots[h, k]`;
- their number fits: `Σ_{h<=i} f[h, k]·n_h <= Σ_{h<=i} y[h, k]·(1 + m[h, i, k])` with m the most
  sequences of length l_i that such a pipeline can hold beside its longest.

So a latency is a lower bound if no solution exists with the pipelines that are available.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.planner.linear_program import LinearProgram
from lightning_hetero.planner.proposing.relaxation import SequenceRuns

ROUNDING = 1e-6
"""Relative amount by which a solution may exceed the limit of a row."""


@dataclass(frozen=True, kw_only=True)
class StageSeconds:
    """Times of a pipeline by its longest sequence's run and its kind, [R, K]; < 0 if impossible."""

    slots: FloatArray
    """Seconds of a stage for its micro-batches."""
    room: FloatArray
    """Seconds of `slots` that are left for sequences, without the constants c."""


def add_cover(program: LinearProgram, runs: SequenceRuns, seconds: StageSeconds) -> IntArray | None:
    """Add the module's variables f and y, and their rows, to a programme; return y [R, K].

    Returns None if a run fits on no kind of pipeline, so that no cover exists.
    """
    limits = runs.table.max_len
    allowed = (runs.least[:, None] <= limits) & (
        runs.table.times_s(runs.least) <= seconds.room * (1 + ROUNDING)
    )
    if not allowed.any(axis=1).all():
        return None
    shares = program.add_variables(upper=allowed.astype(float).ravel()).reshape(allowed.shape)
    opened = program.add_variables(upper=np.where(allowed, np.inf, 0.0).ravel())
    opened = opened.reshape(allowed.shape)
    for row, is_allowed in zip(shares, allowed, strict=True):
        program.add_row(row[is_allowed], 1.0, lower=1.0, upper=1.0)
    fixed_s = runs.table.c * runs.tokens[:, None] / limits
    for kind in range(len(limits)):
        slots_s, room_s = seconds.slots[:, kind], seconds.room[:, kind]
        work_s = runs.work_s[:, kind]
        most = _most_sequences(runs, kind, slots_s, room_s)
        for end in range(1, len(shares) + 1):
            columns = np.concatenate([shares[:end, kind], opened[:end, kind]])
            for load, limit in (
                (work_s, room_s),
                (work_s + fixed_s[:, kind], slots_s),
                (runs.counts, most[:, end - 1]),
            ):
                values = np.concatenate([load[:end], -np.maximum(limit[:end], 0.0)])
                program.add_row(columns, values, upper=0.0)
    return opened


def _most_sequences(
    runs: SequenceRuns, kind: int, slots_s: FloatArray, room_s: FloatArray
) -> FloatArray:
    """Return [h, i]: 1 + m, for the most sequences m of length l_i that fit beside one of run h."""
    times_s = runs.table.times_s(runs.least)[:, kind]
    full_s = times_s + runs.table.c[kind] * runs.least / runs.table.max_len[kind]
    by_room = (room_s - times_s)[:, None] / times_s
    by_slots = (slots_s - full_s)[:, None] / full_s
    beside: FloatArray = np.floor(np.minimum(by_room, by_slots) + ROUNDING)
    return 1 + np.maximum(beside, 0.0)


def least_possible_s(
    is_possible: Callable[[float], bool], low_s: float, high_s: float, precision: float
) -> float:
    """Return the largest latency found impossible, a lower bound, by bisection.

    Args:
        is_possible: Returns False only for latencies that can't be reached.
        low_s: A known lower bound, returned if no latency above it is found impossible.
        high_s: A latency that is known to be possible.
        precision: Relative width at which the bisection ends.
    """
    while high_s - low_s > precision * high_s:
        middle_s = (low_s + high_s) / 2
        if is_possible(middle_s):
            high_s = middle_s
        else:
            low_s = middle_s
    return low_s
