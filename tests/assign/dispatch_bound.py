"""A lower bound near the best dispatch by Eq. 3, from a few linear programmes (`covering`)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.assign.dispatch import fast_lower_bound_s
from lightning_hetero.assign.pipeline_cost import CostTable, PipelineCost, as_lengths
from lightning_hetero.planner.linear_program import LinearProgram
from lightning_hetero.planner.proposing.work_bound import SequenceRuns
from tests.assign.covering import ROUNDING, StageSeconds, add_cover, least_possible_s

__all__ = ["dispatch_lower_bound_s"]

_PRECISION = 1e-3


def dispatch_lower_bound_s(
    lengths: ArrayLike, pipelines: Sequence[PipelineCost], *, upper_bound_s: float
) -> float:
    """Return a lower bound near the optimum of Eq. 3, by bisection over a linear relaxation.

    A pipeline of latency x whose longest sequence is h has `x - (PP-1)·(T(h) + c)` seconds for its
    micro-batches. Every dispatch of latency x is a cover (`covering`) by the plan's pipelines, so x
    is a lower bound if no cover makes do with a share of 1 of each kind of them.

    Args:
        lengths: [B].
        pipelines: The D pipelines.
        upper_bound_s: Latency of a known dispatch.
    """
    sizes, every = as_lengths(lengths), CostTable.of(pipelines)
    low_s = min(fast_lower_bound_s(sizes, every.fitting_times_s(sizes), every), upper_bound_s)
    kinds = list(dict.fromkeys(pipelines))
    counts = [float(pipelines.count(kind)) for kind in kinds]
    runs = SequenceRuns.of(sizes, CostTable.of(kinds))
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
            program.add_row([*columns, share], [*np.ones(len(columns)), -count], upper=0.0)
        return program.minimize().lower_bound <= 1 + ROUNDING

    return least_possible_s(is_possible, low_s, upper_bound_s, _PRECISION)
