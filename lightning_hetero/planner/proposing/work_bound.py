"""Bound the time of an iteration on any mix of pipelines from below, by one linear programme.

Only work is counted, no bubbles: in x seconds a pipeline does x seconds of a stage's work, any
fraction of a pipeline may be used, and every length may choose its scheme.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.assign.pipeline_cost import CostTable, as_lengths
from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.planner.proposing.proposal import Scheme
from lightning_hetero.planner.proposing.relaxation import AverageWork, fractional_plan

__all__ = ["SequenceRuns", "longest_alone_s", "possible_schemes", "work_lower_bound_s"]


_SPREAD = 0.03


@dataclass(frozen=True, kw_only=True)
class SequenceRuns:
    """R runs of sequences of nearly equal length, longest first, on K kinds of pipeline."""

    table: CostTable
    """The K kinds."""
    least: IntArray
    """[R] least length of each run."""
    counts: IntArray
    """[R] number of sequences of each run."""
    tokens: IntArray
    """[R] tokens of each run."""
    work_s: FloatArray
    """[R, K] seconds of a stage for each run, on each kind."""

    @classmethod
    def of(cls, lengths: IntArray, table: CostTable) -> Self:
        """Cut the sequences into runs.

        Lengths of a run differ by 3 % at most, which hardly lowers bounds.
        """
        ordered = np.sort(lengths)[::-1]
        starts = [0]
        for index, length in enumerate(ordered.tolist()):
            if length < ordered[starts[-1]] * (1 - _SPREAD):
                starts.append(index)
        ends = np.array([*starts[1:], len(ordered)])
        return cls(
            table=table,
            least=ordered[ends - 1],
            counts=ends - np.array(starts),
            tokens=np.add.reduceat(ordered, starts),
            work_s=np.add.reduceat(table.times_s(ordered), starts, axis=0),
        )


def work_lower_bound_s(
    lengths: ArrayLike, schemes: Sequence[Scheme], num_devices: Mapping[str, int]
) -> float:
    """Return seconds below which the devices can't do the work; infinite if they never can.

    Args:
        lengths: [B] tokens of the iteration's sequences.
        schemes: Schemes that a pipeline may have.
        num_devices: How many devices of each type there are.
    """
    kept = possible_schemes(schemes, num_devices)
    if not kept:
        return math.inf
    sizes, table = as_lengths(lengths), CostTable.of([scheme.cost for scheme in kept])
    runs = SequenceRuns.of(sizes, table)
    work = AverageWork(
        work_s=runs.work_s + table.c * runs.tokens[:, None] / table.max_len,
        alone_s=table.times_s(runs.least) + table.c,
        fits=runs.least[:, None] <= table.max_len,
        lost_s=np.zeros(len(kept)),
        devices=np.array([[dict(s.devices).get(d, 0) for d in num_devices] for s in kept], float),
        available=np.array(list(num_devices.values()), float),
    )
    found = fractional_plan(work, with_bubbles=False)
    if found is None:
        return math.inf
    return max(longest_alone_s(int(sizes.max()), table), found.latency_s)


def possible_schemes(schemes: Sequence[Scheme], num_devices: Mapping[str, int]) -> list[Scheme]:
    """Return the schemes for which there are enough devices."""
    return [
        scheme
        for scheme in schemes
        if all(num_devices.get(device, 0) >= count for device, count in scheme.devices)
    ]


def longest_alone_s(longest: int, table: CostTable) -> float:
    """Return the seconds of the longest sequence alone on the fastest scheme that holds it."""
    return float(np.where(longest <= table.max_len, table.alone_s(np.array(longest)), np.inf).min())
