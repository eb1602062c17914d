"""Decide how many micro-batches each pipeline gets: Greyhound's S2, by min-max, not variance.

::

    minimise   max_i  fixed_i + m_i · t_i
    such that  Σ m_i = M,  m_i ≥ 1,  m_i whole

The planner shares micro-batches by the same water filling; where pipelines would end together, the
first of them gets more.
"""

import math
from collections.abc import Sequence

from lightning_hetero.assign.microbatch_shares import share_microbatches
from lightning_hetero.core.errors import PlanningError

__all__ = ["balance_microbatches"]


def balance_microbatches(
    times_s: Sequence[float], num_microbatches: int, *, fixed_s: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Return how many micro-batches each pipeline gets so that the last one ends first.

    Args:
        times_s: Seconds per micro-batch of each pipeline (of its slowest stage).
        num_microbatches: Micro-batches of the whole iteration, one a pipeline at least.
        fixed_s: Seconds each pipeline spends whatever its count, such as filling it.

    Raises:
        PlanningError: The numbers can't be met.
    """
    count = len(times_s)
    fixed = [0.0] * count if fixed_s is None else list(fixed_s)
    if not count or len(fixed) != count:
        raise PlanningError(
            f"{count} times and {len(fixed)} fixed times are given; give one of each per pipeline, "
            "and at least one pipeline."
        )
    bad = [t for t in times_s if not 0.0 < t < math.inf]
    bad += [f for f in fixed if not 0.0 <= f < math.inf]
    if bad:
        raise PlanningError(
            f"A pipeline's time is {bad[0]} s; times must be positive and finite. Leave a dead "
            "pipeline out."
        )
    limits = [num_microbatches] * count
    shares = share_microbatches(fixed[::-1], times_s[::-1], [1] * count, limits, num_microbatches)
    if shares is None:
        raise PlanningError(
            f"{num_microbatches} micro-batches are too few for {count} pipelines. Give more."
        )
    return tuple(share for (share,) in reversed(shares))
