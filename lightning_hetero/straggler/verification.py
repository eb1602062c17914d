"""Decide whether two levels differ by more than the noise of the first explains.

The verification step of Greyhound's BOCD+V compares the means before and after a change. Iteration
times have heavy tails and correlated noise, so medians stand for means, and how far a median of n
values strays is read off the medians of n values that came before, not from σ/√n.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["is_significant", "median", "robust_scale", "without_outliers", "without_warmup"]

_NORMAL_MAD = 1.4826
_MEDIAN_SPREAD = 1.2533
"""Standard deviation of the median of n normal values, in units of σ/√n (large n)."""

_FACTOR_INDEPENDENT = 6.25
_FACTOR_AUTOREGRESSIVE = 5.0
_FACTOR_CORRELATED = 4.0
_LARGE = math.log(1.5)
"""A shift so large that noise whose spread is badly told is no excuse for it."""
_LEAST_CORRELATED = 32
"""Values from which a correlation can be told."""
_HIGHEST_CORRELATION = 0.9
_BEYOND = 1.4
_WARMUP_DEVIATIONS = 5.0
_LEAST_WARMUP_SCALE = 0.005
_TAIL_SHARE = 0.85
_TAIL_DEVIATIONS = 1.0364
"""Standard deviations from the median to that share of normal values."""


def median(values: Sequence[float]) -> float:
    """Return the median of at least one value (faster than NumPy's for some hundreds)."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return 0.5 * (ordered[middle - 1] + ordered[middle])


def robust_scale(values: Sequence[float]) -> float:
    """Return the standard deviation as the median absolute deviation tells it."""
    center = median(values)
    return _NORMAL_MAD * median([abs(value - center) for value in values])


def is_significant(
    before: Sequence[float],
    after: Sequence[float],
    *,
    scale: float,
    noise: Sequence[float] = (),
) -> bool:
    """Tell whether the noise of `before` can't have made the medians differ as they do.

    Four things must hold: the new median lies far out for independent values, far out for values as
    correlated as those of `before`, far out beside the running medians of `before`, and farther out
    than any of them.

    Args:
        before: Values of the old level.
        after: Values of the new one.
        scale: Standard deviation of `before` where it is too short to tell it.
        noise: Deviations of values before those from their own level, which tell how values follow
            each other where `before` is short: that is the machine's way, not the level's.
    """
    center = median(before)
    kept = without_outliers(after, scale=scale) or after
    shift = _lower_median(kept, rises=median(after) > center) - center
    spread = scale if len(before) < 8 else _spread_towards(before, rises=shift > 0.0)
    # A few values tell their own spread badly, as Student's t says. But machines whose noise could
    # be mistaken for a half more are rarer than faults that take it.
    doubt = 1.0 + 6.0 / len(before) if abs(shift) < _LARGE else 1.0
    error = doubt * spread * math.sqrt(1.0 / len(kept) + 1.0 / len(before)) * _MEDIAN_SPREAD
    deviations = [*noise, *(value - center for value in before)]
    if abs(shift) < max(_FACTOR_INDEPENDENT, _FACTOR_AUTOREGRESSIVE * _stray(deviations)) * error:
        return False
    medians = _running_medians(deviations, len(after))
    if not medians.size:
        return True
    if abs(shift) < _FACTOR_CORRELATED * doubt * float(medians.std()):
        return False
    extreme = float(medians.max() if shift > 0.0 else medians.min())
    return abs(shift) >= _BEYOND * abs(extreme)


def _spread_towards(values: Sequence[float], *, rises: bool) -> float:
    """Return the standard deviation on one side: iteration times have a long upper tail.

    Regular spikes also lengthen it, so it is at most 2.5 times what the middle half says.
    """
    ordered = sorted(values)
    share = _TAIL_SHARE if rises else 1.0 - _TAIL_SHARE
    tail = abs(ordered[round(share * (len(ordered) - 1))] - median(values)) / _TAIL_DEVIATIONS
    whole = robust_scale(values)
    return min(max(tail, whole), 2.5 * whole)


def _stray(values: Sequence[float]) -> float:
    """Return how many times farther means of these values stray than independent ones' do.

    √((1+ρ)/(1-ρ)) for autoregressive noise; ρ is its lag-1 correlation without outliers, less the
    standard error of ρ.
    """
    if len(values) < _LEAST_CORRELATED:
        return 1.0
    limit = 3.0 * robust_scale(values)
    deviations = np.clip(np.asarray(values) - median(values), -limit, limit)
    variance = float(deviations @ deviations)
    if not variance > 0.0:
        return 1.0
    found = float(deviations[1:] @ deviations[:-1]) / variance - 1.0 / math.sqrt(len(values))
    correlation = min(_HIGHEST_CORRELATION, max(0.0, found))
    return math.sqrt((1.0 + correlation) / (1.0 - correlation))


def without_outliers(values: Sequence[float], *, scale: float) -> list[float]:
    """Return the values within eight standard deviations of their median."""
    center = median(values)
    return [value for value in values if abs(value - center) <= 8.0 * scale]


def without_warmup(values: Sequence[float]) -> Sequence[float]:
    """Leave out the first values, as far as they lie above what the later half explains."""
    settled = values[len(values) // 2 :]
    scale = max(_LEAST_WARMUP_SCALE, robust_scale(settled))
    highest = median(settled) + _WARMUP_DEVIATIONS * scale
    first = next(index for index, value in enumerate(values) if value <= highest)
    return values[first:]


def _lower_median(values: Sequence[float], *, rises: bool) -> float:
    """Return the middle value, of two the one nearer to where the level came from."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if rises else ordered[len(ordered) // 2]


def _running_medians(values: Sequence[float], width: int) -> NDArray[np.float64]:
    """Return the medians of all runs of up to 16 values; none if there are too few values."""
    width = min(width, 16)
    if len(values) < width + 6:
        return np.empty(0)
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(values), width)
    return np.partition(windows, (width - 1) // 2, axis=1)[:, (width - 1) // 2]
