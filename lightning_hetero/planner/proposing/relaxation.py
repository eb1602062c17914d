"""Bound the seconds of some sequences on devices from below: no plan computes them sooner.

A *scheme* k is one way to run a pipeline; a pipeline of it takes N[k, t] devices of type t, of
which the cluster has N_t. A *run* r is a group of sequences of nearly equal length; a pipeline of
scheme k computes all of it in W[r, k] seconds.

The paper's dynamic programme (Hydraulis §7, Eq. 4) divides the lengths into intervals and gives
each interval to d pipelines of one scheme, such that the slowest interval ends soonest. If d may be
a fraction, an interval can be divided further at no cost. So each run can choose its schemes by
itself: they compute shares f[r, k] of it. Let λ be the seconds until all have ended, and D_k =
d_k·λ the pipeline-seconds of scheme k. Then the best fractional plan solves a linear programme::

    minimise    λ
    subject to  Σ_k f[r, k] = 1             for each run r, over the schemes k that hold it,
                Σ_r W[r, k]·f[r, k] ≤ D_k   for each scheme k,
                Σ_k N[k, t]·D_k ≤ λ·N_t     for each type t of devices.

It is the limit of the paper's programme for ever finer steps of d. It leaves out bubbles, allows
fractions of pipelines and lets a scheme compute a run of which it holds the shortest sequence.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.assign.pipeline_cost import CostTable, PipelineCost, as_lengths
from lightning_hetero.core.arrays import BoolArray, FloatArray, IntArray
from lightning_hetero.planner.linear_program import LinearProgram

_SPREAD = 0.03
"""The shortest sequence of a run is at most this share shorter than its longest one."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One way to run a pipeline: its cost and the devices it takes."""

    cost: PipelineCost
    """Latency coefficients and limits."""
    devices: tuple[tuple[str, int], ...]
    """Device types and how many of each; the stages of one pipeline may use several types."""


class SchemeTable:
    """K schemes on a cluster, as arrays.

    Args:
        schemes: The schemes.
        num_devices: How many devices of each type there are.
    """

    def __init__(self, schemes: Sequence[Scheme], num_devices: Mapping[str, int]) -> None:
        self.costs = [scheme.cost for scheme in schemes]
        self.table = CostTable.of(self.costs)
        rows = [dict(scheme.devices) for scheme in schemes]
        types = sorted({*num_devices, *(name for row in rows for name in row)})
        self.devices: IntArray = np.array(
            [[row.get(name, 0) for name in types] for row in rows], np.int64
        ).reshape(len(rows), len(types))
        """[K, types] devices of each type that a pipeline takes."""
        self.available: IntArray = np.array([num_devices.get(name, 0) for name in types])
        """[types] devices of the cluster."""
        self.usable: BoolArray = np.asarray((self.devices <= self.available).all(axis=1))
        """[K] whether the cluster has the devices of one pipeline."""

    def alone_s(self, longest: IntArray) -> FloatArray:
        """Return the least seconds of sequences [...] that have a pipeline to themselves, [...]."""
        fits = self.usable & (longest[..., None] <= self.table.max_len)
        least_s: FloatArray = np.where(fits, self.table.alone_s(longest), np.inf).min(axis=-1)
        return least_s


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
    """[R, K] seconds of a stage for each run, on each kind, without c."""

    @classmethod
    def of(cls, lengths: IntArray, table: CostTable) -> Self:
        """Cut the sequences into runs."""
        ordered, ends = np.sort(lengths)[::-1], [0]
        while ends[-1] < len(ordered):
            limit = ordered[ends[-1]] * (1 - _SPREAD)
            ends.append(int(np.searchsorted(-ordered, -limit, side="right")))
        starts, ends = ends[:-1], ends[1:]
        return cls(
            table=table,
            least=ordered[np.array(ends) - 1],
            counts=np.diff([0, *ends]),
            tokens=np.add.reduceat(ordered, starts),
            work_s=np.add.reduceat(table.times_s(ordered), starts, axis=0),
        )


def fractional_s(lengths: IntArray, schemes: SchemeTable) -> float:
    """Return λ for some sequences; infinite if one fits no scheme."""
    table = schemes.table
    runs = SequenceRuns.of(lengths, table)
    fits = schemes.usable & (runs.least[:, None] <= table.max_len)
    if not fits.any(axis=1).all():
        return math.inf
    # Every micro-batch takes c, and holds MaxLen tokens at most.
    work_s = runs.work_s + table.c * runs.tokens[:, None] / table.max_len
    program = LinearProgram()
    shares = program.add_variables(upper=fits.astype(float).ravel()).reshape(fits.shape)
    seconds = program.add_variables(upper=np.full(len(schemes.costs), np.inf))
    (latency,) = program.add_variables(upper=np.inf, cost=1.0)
    for row, can in zip(shares, fits, strict=True):
        program.add_row(row[can], 1.0, lower=1.0, upper=1.0)
    for k, can in enumerate(fits.T):
        program.add_row([*shares[can, k], seconds[k]], [*work_s[can, k], -1.0], upper=0.0)
    for devices, available in zip(schemes.devices.T, schemes.available, strict=True):
        program.add_row([*seconds, latency], [*devices, -available], upper=0.0)
    return program.minimize().objective


def work_lower_bound_s(
    lengths: ArrayLike, schemes: Sequence[Scheme], num_devices: Mapping[str, int]
) -> float:
    """Return seconds below which the devices can't do the work; infinite if they never can.

    Args:
        lengths: [B] tokens of the iteration's sequences.
        schemes: Schemes that a pipeline may have.
        num_devices: How many devices of each type there are.
    """
    sizes, table = as_lengths(lengths), SchemeTable(schemes, num_devices)
    least_s = fractional_s(sizes, table)
    return max(least_s, float(table.alone_s(sizes.max()))) if least_s < math.inf else least_s
