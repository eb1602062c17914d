"""What no plan can beat: a lower bound of an iteration over all plans and assignments.

A plan is any number of pipelines of each scheme that the devices allow, chosen anew for every
iteration; an assignment is any dispatch and packing, run by 1F1B with a third of a micro-batch's
time in forward. Micro-batches t_1 ... t_V of S seconds together, the longest t_M with R = S - t_M
around it, take a pipeline of PP stages at least

- `S + (PP-1)·min_j t_j`: the last stage waits for the first forward, the first stage for the last
  backward;
- `PP·t_M + R/3`: a forward before t_M or a backward after it passes the first stage, t_M passes all
  stages both ways;
- `t_M + 2/3·(R + (PP-1)·t_M)`: at most PP-1 micro-batches before t_M, none longer than it, have
  their backward after t_M's forward on the first stage, and at most PP-1 behind t_M have their
  forward before t_M's backward. The others pass it whole, before or after.

The last argument, made for every micro-batch and not the longest alone, says how steeply their
times can rise and fall, so how many, each with its c, work with little loss needs (`_ramp`).
With `t_M >= T(h) + c` for the longest sequence h, each limits the seconds S that a pipeline of
latency x has for micro-batches, and `covering` says what fits into them.

That takes minutes for many devices; `work_lower_bound_s` of the package takes a second.
"""

import functools
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.assign.dispatch import latency_bound_s
from lightning_hetero.assign.iteration import microbatch_range
from lightning_hetero.assign.pipeline_cost import (
    CostTable,
    PipelineCost,
    as_lengths,
    sequence_times_s,
)
from lightning_hetero.core.arrays import FloatArray
from lightning_hetero.planner.linear_program import LinearProgram
from lightning_hetero.planner.proposing.proposal import Scheme
from lightning_hetero.planner.proposing.work_bound import (
    SequenceRuns,
    longest_alone_s,
    possible_schemes,
)
from tests.assign.covering import ROUNDING, StageSeconds, add_cover, least_possible_s

__all__ = ["dispatch_lower_bound_s", "packing_lower_bound_s", "plan_lower_bound_s"]

_SOLVE_S = 5.0
_MOST_MICROBATCHES = 64


def plan_lower_bound_s(
    lengths: ArrayLike,
    schemes: Sequence[Scheme],
    num_devices: Mapping[str, int],
    *,
    upper_bound_s: float,
    precision: float = 2e-3,
) -> float:
    """Return seconds below which no plan and assignment can finish these sequences.

    By bisection: a latency is a lower bound if no cover by whole numbers n_k of pipelines makes do
    with a share of 1 of the devices of every type.

    Args:
        lengths: [B] tokens of the iteration's sequences.
        schemes: What a pipeline can be.
        num_devices: How many devices of each type there are.
        upper_bound_s: Seconds that a plan is known to take.
        precision: Relative width at which the bisection ends.
    """
    kept = possible_schemes(schemes, num_devices)
    sizes, table = as_lengths(lengths), CostTable.of([scheme.cost for scheme in kept])
    runs = SequenceRuns.of(sizes, table)

    def is_possible(latency_s: float, *, whole: bool) -> bool:
        program = LinearProgram()
        opened = add_cover(program, runs, _stage_seconds(runs, latency_s))
        if opened is None:
            return False
        (share,) = program.add_variables(upper=np.inf, cost=1.0)
        counts = program.add_variables(upper=np.full(len(kept), np.inf), integral=whole)
        for columns, count in zip(opened.T, counts, strict=True):
            program.add_row([*columns, count], [*np.ones(len(columns)), -1.0], upper=0.0)
        for device, available in num_devices.items():
            needed = [dict(scheme.devices).get(device, 0) for scheme in kept]
            program.add_row([*counts, share], [*needed, -float(available)], upper=0.0)
        found = program.minimize(time_limit_s=_SOLVE_S, enough=1.0)
        return found.lower_bound <= 1 + ROUNDING

    bound_s = min(longest_alone_s(int(sizes.max()), table), upper_bound_s)
    # Fractional numbers take a fiftieth of the time, and leave less for whole ones to try.
    for whole in (False, True):
        test = functools.partial(is_possible, whole=whole)
        bound_s = least_possible_s(test, bound_s, upper_bound_s, precision)
    return bound_s


def _stage_seconds(runs: SequenceRuns, latency_s: float) -> StageSeconds:
    """Return what pipelines of a latency have for micro-batches and for sequences."""
    table = runs.table
    longest_s = table.times_s(runs.least) + table.c
    bubbles = table.num_bubbles
    rest_s = latency_s - longest_s
    slots_s = np.minimum.reduce(
        [
            np.broadcast_to(latency_s - bubbles * longest_s[-1], longest_s.shape),
            longest_s + 3 * (rest_s - bubbles * longest_s),
            longest_s + 1.5 * rest_s - bubbles * longest_s,
        ]
    )
    slots_s[longest_s * (bubbles + 1) > latency_s * (1 + ROUNDING)] = -1.0
    room_s = np.stack(
        [
            _room_s(latency_s, float(table.c[k]), int(bubbles[k]), longest_s[:, k])
            for k in range(len(bubbles))
        ],
        axis=1,
    )
    return StageSeconds(slots=slots_s, room=np.minimum(slots_s - table.c, room_s))


def _room_s(
    latency_s: float, constant_s: float, num_bubbles: int, longest_s: FloatArray
) -> FloatArray:
    """Return the most work [R] with the best number of micro-batches for each longest one."""
    if num_bubbles == 0:
        return np.full(longest_s.shape, latency_s - constant_s)
    best_s = np.full(longest_s.shape, latency_s - constant_s * (_MOST_MICROBATCHES + 1))
    for count in range(1, _MOST_MICROBATCHES + 1):
        total, largest = _ramp(num_bubbles, count)
        lost_s = np.maximum(latency_s / (1 + total), longest_s / largest)
        best_s = np.maximum(best_s, latency_s - lost_s - constant_s * count)
    return best_s


@functools.cache
def _ramp(num_bubbles: int, count: int) -> tuple[float, float]:
    """Return how long `count` micro-batches can be, together and the longest, per second lost.

    The solution t of `(PP-1)·t_j = 1 + 2/3·Σ t_before + 1/3·Σ t_after` over windows of PP-1. The
    matrix has an inverse without negative entries, so it bounds all that satisfy `<=`.
    """
    offsets = np.arange(count)[:, None] - np.arange(count)
    before = (offsets > 0) & (offsets <= num_bubbles)
    after = (offsets < 0) & (offsets >= -num_bubbles)
    matrix = num_bubbles * np.eye(count) - before * 2 / 3 - after / 3
    times = np.linalg.solve(matrix, np.ones(count))
    return float(times.sum()), float(times.max())


def dispatch_lower_bound_s(
    lengths: ArrayLike, pipelines: Sequence[PipelineCost], *, upper_bound_s: float
) -> float:
    """Return a lower bound of any dispatch (Eq. 3), by bisection below a known one's latency.

    A pipeline of latency x whose longest sequence is h has `x - (PP-1)·(T(h) + c)` seconds for its
    micro-batches. A latency is a lower bound if every cover needs more pipelines of some kind than
    the plan has.
    """
    sizes = as_lengths(lengths)
    bound_s = latency_bound_s(sizes, CostTable.of(pipelines))
    kinds = list(dict.fromkeys(pipelines))
    runs = SequenceRuns.of(sizes, CostTable.of(kinds))
    lost_s = runs.table.num_bubbles * (runs.table.times_s(runs.least) + runs.table.c)

    def is_possible(latency_s: float) -> bool:
        program, slots_s = LinearProgram(), latency_s - lost_s
        seconds = StageSeconds(slots=slots_s, room=slots_s - runs.table.c)
        opened = add_cover(program, runs, seconds)
        if opened is None:
            return False
        (share,) = program.add_variables(upper=np.inf, cost=1.0)
        for columns, kind in zip(opened.T, kinds, strict=True):
            values = [*np.ones(len(columns)), -float(list(pipelines).count(kind))]
            program.add_row([*columns, share], values, upper=0.0)
        return program.minimize().lower_bound <= 1 + ROUNDING

    return least_possible_s(is_possible, min(bound_s, upper_bound_s), upper_bound_s, 1e-3)


def packing_lower_bound_s(lengths: ArrayLike, cost: PipelineCost) -> float:
    """Return a lower bound of any packing (Eq. 1) in as many micro-batches as are tried.

    The longest of V micro-batches has at least the mean, the longest sequence, and for each k the
    k + 1 shortest of the kV + 1 longest sequences, since some micro-batch holds k + 1 of those.
    """
    sizes = np.sort(as_lengths(lengths))[::-1]
    if not len(sizes):
        return 0.0
    times_s = sequence_times_s(sizes, cost)
    sums_s = np.concatenate([[0.0], np.cumsum(times_s)])

    def bound_s(count: int) -> float:
        fewest = np.arange((len(sizes) - 1) // count + 1)
        ends = fewest * count + 1
        longest_s = float((sums_s[ends] - sums_s[ends - fewest - 1]).max())
        return cost.latency_s(max(longest_s, float(sums_s[-1]) / count), count)

    return min(map(bound_s, microbatch_range(sizes, cost)))
