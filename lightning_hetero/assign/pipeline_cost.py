"""The cost of a sequence on a pipeline: the latency model and the limits of one parallel scheme.

Hydraulis Appendix B: one stage takes `a·l² + b·l` for the forward and backward of a sequence of l
tokens, and every micro-batch, however packed, pays `c` once more. A pipeline of PP stages that runs
V micro-batches takes `(longest micro-batch + c)·(PP - 1 + V)` (Eq. 1 with c).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.core.errors import AssignmentError

__all__ = [
    "UNFIT_S",
    "CostTable",
    "PipelineCost",
    "as_lengths",
    "microbatch_times_s",
    "sequence_times_s",
    "typical_length",
]

UNFIT_S = 1e30
"""Stands for the time of a sequence where it doesn't fit; finite, so that 0 bubbles of it are 0."""


@dataclass(frozen=True, kw_only=True)
class PipelineCost:
    """Latency coefficients and length limits of one pipeline.

    Raises:
        AssignmentError: A coefficient is negative, or a limit is below 1.
    """

    a: float
    """Seconds per squared token of a stage's forward and backward, 0 or more."""
    b: float
    """Seconds per token of a stage's forward and backward, above 0."""
    c: float
    """Seconds per micro-batch and stage whatever it holds, 0 or more."""
    max_len: int
    """Most tokens a micro-batch may hold (MaxLen), 1 or more."""
    util_len: int
    """Tokens from which the device is well used (UtilLen), 1 or more."""
    num_stages: int
    """Number of stages (PP), 1 or more."""

    def __post_init__(self) -> None:
        if not (self.a >= 0 and self.b > 0 and self.c >= 0):
            raise AssignmentError(
                f"A pipeline has a={self.a}, b={self.b}, c={self.c}; a and c must be 0 or more "
                "and b above 0. Profile the pipeline again."
            )
        if self.max_len < 1 or self.util_len < 1 or self.num_stages < 1:
            raise AssignmentError(
                f"A pipeline has max_len={self.max_len}, util_len={self.util_len}, "
                f"num_stages={self.num_stages}; each must be 1 or more. A pipeline that has no "
                "memory for a single token belongs in no plan."
            )

    def schedule_s(self, microbatches_s: FloatArray) -> float:
        """Return about when a 1F1B schedule of unequal micro-batches ends, a little above it.

        `Σ_j t_j + (PP - 1)·max_j t_j` with c in each t, as in a flow shop. Simulated schedules take
        0.90 to 1.00 of it, but only 0.75 of Eq. 1 where micro-batches differ much.
        """
        if not len(microbatches_s):
            return 0.0
        return float(microbatches_s.sum() + (self.num_stages - 1) * microbatches_s.max())

    def latency_s(self, longest_microbatch_s: float, num_microbatches: int) -> float:
        """Return the seconds of an iteration by Eq. 1; `longest_microbatch_s` is without `c`."""
        return (longest_microbatch_s + self.c) * (self.num_stages - 1 + num_microbatches)


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """The coefficients of D pipelines as arrays of shape [D], for vectorised arithmetic."""

    a: FloatArray
    b: FloatArray
    c: FloatArray
    max_len: IntArray
    num_bubbles: FloatArray
    """PP - 1."""

    @classmethod
    def of(cls, pipelines: Sequence[PipelineCost]) -> "CostTable":
        """Gather the coefficients; AssignmentError without pipelines."""
        if not pipelines:
            raise AssignmentError("A plan has 0 pipelines to assign to; give it at least one.")
        return cls(
            a=np.array([p.a for p in pipelines], dtype=np.float64),
            b=np.array([p.b for p in pipelines], dtype=np.float64),
            c=np.array([p.c for p in pipelines], dtype=np.float64),
            max_len=np.array([p.max_len for p in pipelines], dtype=np.int64),
            num_bubbles=np.array([p.num_stages - 1 for p in pipelines], dtype=np.float64),
        )

    def times_s(self, lengths: IntArray) -> FloatArray:
        """Return T(l) of lengths [...] on every pipeline, [..., D]."""
        column = lengths[..., None].astype(np.float64)
        return (self.a * column + self.b) * column

    def fitting_times_s(self, lengths: IntArray) -> FloatArray:
        """Return T(l) [B, D], `UNFIT_S` where a sequence exceeds a pipeline's MaxLen."""
        times_s = self.times_s(lengths)
        times_s[lengths[:, None] > self.max_len] = UNFIT_S
        return times_s

    def alone_s(self, lengths: IntArray) -> FloatArray:
        """Return Eq. 1 of sequences [...] that have a pipeline to themselves, [..., D]."""
        return self.times_s(lengths) + self.lost_s(lengths)

    def lost_s(self, longest: IntArray) -> FloatArray:
        """Return what bubbles and one micro-batch's c cost beside the work, [..., D].

        It is the least that a pipeline loses whose longest sequence has `longest` tokens.
        """
        return self.num_bubbles * self.times_s(longest) + self.c * (self.num_bubbles + 1)


def as_lengths(lengths: ArrayLike) -> IntArray:
    """Return sequence lengths as integers [B]; AssignmentError unless all are 1 or more."""
    array = np.asarray(lengths)
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise AssignmentError(
            f"Lengths have shape {array.shape} and type {array.dtype}; give one list of integers."
        )
    if array.min() < 1:
        raise AssignmentError(
            f"Sequence {int(array.argmin())} has {int(array.min())} tokens; drop empty sequences."
        )
    return array.astype(np.int64)


def typical_length(lengths: IntArray) -> int:
    """Return the length of the sequence that the average token is in."""
    return round(float((lengths.astype(float) ** 2).sum() / lengths.sum()))


def sequence_times_s(lengths: IntArray, cost: PipelineCost) -> FloatArray:
    """Return T(l) of each sequence on a pipeline's stage, without `c`."""
    floats = lengths.astype(np.float64)
    result: FloatArray = (cost.a * floats + cost.b) * floats
    return result


def microbatch_times_s(
    lengths: IntArray, microbatches: Sequence[Sequence[int]], cost: PipelineCost
) -> FloatArray:
    """Return the seconds of a stage for each micro-batch of sample indices, with `c`."""
    times_s = sequence_times_s(lengths, cost)
    return np.array([times_s[list(batch)].sum() + cost.c for batch in microbatches])
