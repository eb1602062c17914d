"""Cost model of a pipeline: the seconds of sequences and micro-batches, and limits of their length.

Hydraulis Appendix B: one stage takes `a·l² + b·l` for the forward and backward of a sequence of l
tokens, and every micro-batch, however packed, takes `c` in addition. A pipeline of PP stages that
runs V micro-batches takes `(longest micro-batch + c)·(PP - 1 + V)` (Eq. 1 with c).

Longer micro-batches fit if a stage recomputes activations. Let K and R be the bytes per token of a
kept and of a recomputed layer, and let micro-batches of KeptLen tokens in flight just fill the
stage's budget. Then those of T > KeptLen tokens must recompute the share
`K / (K - R)·(1 - KeptLen / T)` of its layers, so they take `1 + ρ·(1 - KeptLen / T)` times as long,
where ρ is K / (K - R) times the forward's share of forward and backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.core.errors import AssignmentError
from lightning_hetero.core.reading import check_numbers

UNFIT_S = 1e30
"""Time of a sequence on a pipeline that can't hold it; finite, so that 0 times it is 0."""

NEVER_RECOMPUTED = 2**62
"""KeptLen of a pipeline that keeps all activations."""


@dataclass(frozen=True, kw_only=True)
class PipelineCost:
    """Latency coefficients and length limits of one pipeline (Hydraulis, Appendix B).

    ::

        cost = PipelineCost(a=1e-9, b=1e-5, c=1e-3, max_len=8192, util_len=2048, num_stages=4)
        print(pack([4096, 512, 512], cost).microbatches)

    Raises:
        AssignmentError: A coefficient is negative, or a limit is below 1.
    """

    a: float
    """Seconds per squared token of a stage's forward and backward, 0 or more."""
    b: float
    """Seconds per token of a stage's forward and backward, above 0."""
    c: float
    """Seconds per micro-batch and stage, independent of its contents, 0 or more."""
    max_len: int
    """Largest number of tokens of a micro-batch (MaxLen), 1 or more."""
    util_len: int
    """Tokens of a micro-batch from which the device is well utilised (UtilLen), 1 or more."""
    num_stages: int
    """Number of stages (PP), 1 or more."""
    kept_len: int = NEVER_RECOMPUTED
    """Tokens above which a micro-batch recomputes activations (KeptLen), 1 or more."""
    recompute_share: float = 0.0
    """ρ: the share by which recomputation lengthens very long micro-batches, 0 or more."""

    def __post_init__(self) -> None:
        refuse = partial(check_numbers, AssignmentError, "A pipeline")
        refuse(0, is_above=True, b=self.b)
        refuse(0, a=self.a, c=self.c, recompute_share=self.recompute_share)
        refuse(1, max_len=self.max_len, util_len=self.util_len, kept_len=self.kept_len)
        refuse(1, num_stages=self.num_stages)

    def stretch(self, tokens: IntArray | FloatArray) -> FloatArray:
        """Return the factor by which recomputation lengthens micro-batches of these tokens."""
        return stretch(tokens, self.kept_len, self.recompute_share)

    def schedule_s(self, microbatches_s: FloatArray) -> float:
        """Return an estimate of the seconds of a 1F1B schedule of unequal micro-batches.

        `Σ_j t_j + (PP - 1)·max_j t_j` with c in each t, as in a flow shop. Simulated schedules take
        0.90 to 1.00 of it, but only 0.75 of Eq. 1 if micro-batches differ much.
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
    kept_len: FloatArray
    recompute_share: FloatArray

    @classmethod
    def of(cls, pipelines: Sequence[PipelineCost]) -> "CostTable":
        """Gather the coefficients of one pipeline or more."""
        return cls(
            a=np.array([p.a for p in pipelines], dtype=np.float64),
            b=np.array([p.b for p in pipelines], dtype=np.float64),
            c=np.array([p.c for p in pipelines], dtype=np.float64),
            max_len=np.array([p.max_len for p in pipelines], dtype=np.int64),
            num_bubbles=np.array([p.num_stages - 1 for p in pipelines], dtype=np.float64),
            kept_len=np.array([p.kept_len for p in pipelines], dtype=np.float64),
            recompute_share=np.array([p.recompute_share for p in pipelines], dtype=np.float64),
        )

    def at(self, pipelines: IntArray | int) -> "CostTable":
        """Return the coefficients of some of the pipelines."""
        return CostTable(**{name: values[pipelines] for name, values in vars(self).items()})

    def times_s(self, lengths: IntArray | FloatArray) -> FloatArray:
        """Return T(l) of lengths [...] on every pipeline, [..., D].

        It includes what a sequence longer than KeptLen must recompute even if it is alone.
        """
        column = lengths[..., None].astype(np.float64)
        times_s: FloatArray = (self.a * column + self.b) * column
        if self.recompute_share.any():
            times_s *= stretch(column, self.kept_len, self.recompute_share)
        return times_s

    def fitting_times_s(self, lengths: IntArray) -> FloatArray:
        """Return T(l) [B, D]; `UNFIT_S` if a sequence exceeds a pipeline's MaxLen."""
        times_s = self.times_s(lengths)
        times_s[lengths[:, None] > self.max_len] = UNFIT_S
        return times_s

    def alone_s(self, lengths: IntArray) -> FloatArray:
        """Return Eq. 1 of sequences [...] that have a pipeline to themselves, [..., D]."""
        return self.times_s(lengths) + self.lost_s(lengths)

    def ends_s(self, work_s: FloatArray, longest_s: FloatArray, tokens: FloatArray) -> FloatArray:
        """Return the latency of loads [..., D] by Eq. 2 with c; 0 without tokens.

        It counts the fewest micro-batches that hold the tokens.
        """
        count = np.maximum(np.ceil(tokens / self.max_len - 1e-9), 1.0)
        total_s = work_s + self.num_bubbles * longest_s + self.c * (self.num_bubbles + count)
        result: FloatArray = np.where(tokens > 0.5, total_s, 0.0)
        return result

    def lost_s(self, longest: IntArray) -> FloatArray:
        """Return the seconds of bubbles and of c, with one micro-batch, beside the work, [..., D].

        A pipeline whose longest sequence has `longest` tokens loses at least this.
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
    """Return the mean length of sequences, weighted by tokens, rounded."""
    return round(float((lengths.astype(float) ** 2).sum() / lengths.sum()))


def sequence_times_s(lengths: IntArray, cost: PipelineCost) -> FloatArray:
    """Return T(l) of each sequence on a pipeline's stage, without `c` and recomputation."""
    floats = lengths.astype(np.float64)
    result: FloatArray = (cost.a * floats + cost.b) * floats
    return result


def microbatch_times_s(
    lengths: IntArray, microbatches: Sequence[Sequence[int]], cost: PipelineCost
) -> FloatArray:
    """Return the seconds of a stage for each micro-batch of sample indices, with `c`."""
    times_s = sequence_times_s(lengths, cost)
    tokens = np.array([lengths[list(batch)].sum() for batch in microbatches], dtype=np.float64)
    alone_s = np.array([times_s[list(batch)].sum() for batch in microbatches], dtype=np.float64)
    return alone_s * cost.stretch(tokens) + cost.c


def stretch(
    tokens: IntArray | FloatArray, kept_len: FloatArray | float, share: FloatArray | float
) -> FloatArray:
    """Return by which factor recomputation lengthens micro-batches of these tokens."""
    result: FloatArray = 1.0 + share * np.maximum(1.0 - kept_len / np.maximum(tokens, 1.0), 0.0)
    return result
