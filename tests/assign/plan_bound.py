"""Lower bounds of any dispatch and of any packing, by which benchmarks judge ours."""

from collections.abc import Sequence

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
from lightning_hetero.planner.linear_program import LinearProgram
from lightning_hetero.planner.proposing.relaxation import (
    SequenceRuns,
)
from tests.assign.covering import ROUNDING, StageSeconds, add_cover, least_possible_s


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
