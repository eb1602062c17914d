"""Decide where one iteration ends and the next begins, from communication operations alone.

Training repeats the same operations, so the first lag at which their autocorrelation reaches 0.95
is the number of operations in an iteration (Greyhound). Operations are categories (name, size,
group), so the autocorrelation is that of their one-hot codes: the share of operations that equal
the one `lag` later, corrected for chance. Lags are computed all at once by FFT: O(k·n log n) for n
operations of k kinds. Where all operations look alike (one gradient bucket size), the gaps between
them are the categories: short inside an iteration, long between two.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.core.errors import ConfigurationError

__all__ = ["CommunicationOp", "Period", "infer_period"]

_LEAST_CORRELATION = 0.95
_MOST_KINDS = 64
_LONG_GAP = 2.0


@dataclass(frozen=True, kw_only=True)
class CommunicationOp:
    """One communication operation, as one rank saw it."""

    name: str
    """Its operation: "all_reduce", "send", ..."""
    num_bytes: int
    """Size of the message; any consistent measure will do."""
    start_s: float
    """When it was issued, seconds on any steady clock."""
    group: str = ""
    """The process group, if known."""


@dataclass(frozen=True, kw_only=True)
class Period:
    """How a stream of operations repeats."""

    num_ops: int
    """Operations in an iteration."""
    correlation: float
    """Autocorrelation at that lag, at most 1."""
    iteration_times_s: tuple[float, ...]
    """Times between the starts of iterations, oldest first."""


def infer_period(ops: Sequence[CommunicationOp]) -> Period | None:
    """Return the period of a stream of operations in order of time, or None if it doesn't repeat.

    At least two iterations must be in the stream. Operations of start-up (a broadcast of weights)
    and now and then a validation don't matter, as long as most of the stream repeats.

    Raises:
        ConfigurationError: Operations aren't in order of time.
    """
    if any(later.start_s < earlier.start_s for earlier, later in pairwise(ops)):
        raise ConfigurationError("Operations must be sorted by start_s, the oldest first.")
    codes = _codes(ops)
    if len(codes) < 4:
        return None
    if len(set(codes.tolist())) == 1:
        codes = _gap_codes(ops)
    correlations = _autocorrelation(codes)
    good = np.flatnonzero(correlations[1:] >= _LEAST_CORRELATION)
    if not len(good):
        return None
    lag = int(good[0]) + 1
    starts = _starts(codes, lag)
    times_s = [ops[b].start_s - ops[a].start_s for a, b in pairwise(starts)]
    return Period(
        num_ops=lag,
        correlation=float(correlations[lag]),
        iteration_times_s=tuple(times_s),
    )


def _codes(ops: Sequence[CommunicationOp]) -> IntArray:
    """Return a small number for every kind of operation; rare kinds share the last one."""
    kinds = Counter((op.name, op.num_bytes, op.group) for op in ops)
    number = {kind: i for i, (kind, _) in enumerate(kinds.most_common(_MOST_KINDS - 1))}
    rare = len(number)
    return np.array([number.get((op.name, op.num_bytes, op.group), rare) for op in ops])


def _gap_codes(ops: Sequence[CommunicationOp]) -> IntArray:
    """Return 1 for operations after a long gap, 0 for others; all 0 if gaps are alike."""
    gaps = np.diff([op.start_s for op in ops])
    positive = np.sort(gaps[gaps > 0.0])
    codes = np.zeros(len(ops), dtype=np.int64)
    if len(positive) < 4:
        return codes
    # The widest jump between neighbouring gaps, on a log scale, parts short from long ones. The
    # extreme 2 % are left out: a single stall is no iteration.
    edge = max(1, len(positive) // 50)
    jumps = np.diff(np.log(positive[edge - 1 : len(positive) - edge + 1]))
    widest = int(jumps.argmax())
    if jumps[widest] < np.log(_LONG_GAP):
        return codes
    threshold = np.sqrt(positive[edge - 1 + widest] * positive[edge + widest])
    codes[1:] = gaps > threshold
    # The first operation has no gap before it; an iteration begins with it.
    codes[0] = 1
    return codes


def _autocorrelation(codes: IntArray) -> FloatArray:
    """Return the correlation of one-hot codes for lags 0 to n/2."""
    num_ops, longest = len(codes), len(codes) // 2
    size = 1 << (2 * num_ops - 1).bit_length()
    matches = np.zeros(longest + 1)
    chance = np.zeros(longest + 1)
    overlap = num_ops - np.arange(longest + 1)
    for kind in np.unique(codes):
        present = (codes == kind).astype(np.float64)
        spectrum = np.fft.rfft(present, size)
        matches += np.fft.irfft(spectrum * spectrum.conj(), size)[: longest + 1]
        seen = np.concatenate(([0.0], np.cumsum(present)))
        lags = np.arange(longest + 1)
        chance += seen[num_ops - lags] * (seen[-1] - seen[lags]) / overlap
    share, chance = matches / overlap, chance / overlap
    spread = 1.0 - chance
    # A stream of one kind repeats with every operation.
    return np.where(spread > 1e-9, (share - chance) / np.maximum(spread, 1e-9), 1.0)


def _starts(codes: IntArray, lag: int) -> list[int]:
    """Return where iterations start: at a kind that occurs once in each iteration, if there is one.

    Following one kind keeps step after operations that don't belong (a validation, a log); without
    such a kind every `lag`-th operation is a start.
    """
    num_iterations = len(codes) / lag
    counts = Counter(codes.tolist())
    once = [k for k, count in counts.items() if abs(count - num_iterations) <= 0.1 * num_iterations]
    if once:
        # Of the kinds that occur once, the one that is first in the stream.
        first = {kind: int(np.flatnonzero(codes == kind)[0]) for kind in once}
        anchor = min(once, key=lambda kind: (abs(counts[kind] - num_iterations) > 1, first[kind]))
        return [int(i) for i in np.flatnonzero(codes == anchor)]
    return list(range(len(codes) % lag, len(codes), lag))
