"""A lower bound near the best dispatch by Eq. 3, from a few linear programmes (`covering`)."""

from collections.abc import Sequence

import numpy as np

from lightning_hetero.assign.covering import ROUNDING, StageSeconds, add_cover, least_possible_s
from lightning_hetero.assign.linear_program import LinearProgram
from lightning_hetero.assign.sequence_runs import SequenceRuns

__all__ = ["dispatch_lower_bound_s"]


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
    is a lower bound if no cover makes do with a share of 1 of each kind of them.

    Args:
        runs: The sequences, on every kind of pipeline.
        counts: Pipelines of each kind.
        lower_bound_s: A bound that is known already.
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
