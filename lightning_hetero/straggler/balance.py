"""Decide how many micro-batches each pipeline gets: Greyhound's S2, by min-max, not variance.

::

    minimise   max_i  fixed_i + m_i · t_i
    such that  Σ m_i = M,  m_i ≥ least,  m_i whole

The planner shares micro-batches by the same water filling; where pipelines would end together, the
first of them gets more.
"""

import math
from collections.abc import Sequence

from lightning_hetero.assign.microbatch_shares import share_microbatches
from lightning_hetero.core.errors import PlanningError

__all__ = ["balance_microbatches"]


def balance_microbatches(
    times_s: Sequence[float],
    num_microbatches: int,
    *,
    least: int = 1,
    multiple: int = 1,
    fixed_s: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Return how many micro-batches each pipeline gets so that the last one ends first.

    Args:
        times_s: Seconds per micro-batch of each pipeline (of its slowest stage).
        num_microbatches: Micro-batches of the whole iteration.
        least: Fewest micro-batches a pipeline may get; 0 lets a pipeline idle.
        multiple: Every count is a multiple of this (interleaved 1F1B: the number of stages).
        fixed_s: Seconds each pipeline spends whatever its count, such as filling it.

    Raises:
        PlanningError: The numbers can't be met.
    """
    fixed = [0.0] * len(times_s) if fixed_s is None else list(fixed_s)
    _check(times_s, fixed, num_microbatches, least=least, multiple=multiple)
    units = num_microbatches // multiple
    unit_s = [time_s * multiple for time_s in times_s]
    shares = share_microbatches(
        fixed[::-1],
        unit_s[::-1],
        [1] * len(unit_s),
        [units] * len(unit_s),
        units,
        least=-(-least // multiple),
    )
    assert shares is not None, "numbers were checked and can be met"
    return tuple(share[0] * multiple for share in reversed(shares))


def _check(
    times_s: Sequence[float],
    fixed_s: Sequence[float],
    num_microbatches: int,
    *,
    least: int,
    multiple: int,
) -> None:
    if not times_s or len(fixed_s) != len(times_s):
        raise PlanningError(
            f"{len(times_s)} times and {len(fixed_s)} fixed times are given; give one of each per "
            "pipeline, and at least one pipeline."
        )
    bad = [t for t in times_s if not 0.0 < t < math.inf]
    bad += [f for f in fixed_s if not 0.0 <= f < math.inf]
    if bad:
        raise PlanningError(
            f"A pipeline's time is {bad[0]} s; times must be positive and finite. Leave a dead "
            "pipeline out."
        )
    if multiple < 1 or least < 0 or num_microbatches % multiple:
        raise PlanningError(
            f"{num_microbatches} micro-batches can't be handed out in multiples of {multiple}, at "
            f"least {least} each. Make the number a multiple."
        )
    needed = -(-least // multiple) * multiple * len(times_s)
    if num_microbatches < needed:
        raise PlanningError(
            f"{num_microbatches} micro-batches are too few: {len(times_s)} pipelines need {needed} "
            f"at {least} each. Give more micro-batches or allow fewer each."
        )
