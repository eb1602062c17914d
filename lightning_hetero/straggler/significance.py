"""Tell how far two levels differ beyond what noise explains: one robust statistic.

::

    z = |m₁ - m₀| / (1.2533 σ √(1/n₀ + 1/n₁) √((1+ρ)/(1-ρ)) (1 + (16/n₀)²))

for medians m₀, m₁ of n₀ values before and n₁ after a change. Greyhound's verification compares
means; iteration times have outliers and correlated noise. So medians replace means (which makes the
error of normal values 1.2533 = √(π/2) times larger), σ is estimated from the median absolute
deviation of the values before, and lag-1 correlation ρ makes the error larger by the next factor.

From few values σ and ρ can't be estimated well, as in Student's t: hence the last factor. It is
left out for changes by half or more: noise that looks like one is rarer than such a fault.
"""

import math
from collections.abc import Sequence
from statistics import median

import numpy as np

__all__ = ["robust_scale", "significance", "without_warmup"]

_NORMAL_MAD = 1.4826
"""Standard deviation of normal values over their median absolute deviation."""
_FEW = 8
"""Fewer values than this don't tell their own spread."""
_DOUBTFUL = 16.0
"""Number of values at which the error doubles. Tuned: with 14, correlated noise raises alarms."""
_LARGE = math.log(1.5)
_LEAST_CORRELATED = 32
"""Fewest values that tell a correlation: its standard error is then below 0.18."""
_HIGHEST_CORRELATION = 0.9
"""A higher correlation is drift, which would hide every change."""
_WARMUP_DEVIATIONS = 5.0
"""A first iteration that exceeds the later ones by more standard deviations is warm-up."""
_LEAST_WARMUP_SCALE = 0.005


def robust_scale(values: Sequence[float]) -> float:
    """Return the standard deviation, estimated from the median absolute deviation."""
    center = median(values)
    return _NORMAL_MAD * median([abs(value - center) for value in values])


def significance(
    before: Sequence[float],
    after: Sequence[float],
    *,
    scale: float,
    noise: Sequence[float] = (),
) -> float:
    """Return by how many standard errors the medians of two levels differ; 0 or more.

    Args:
        before: Values of the old level.
        after: Values of the new one.
        scale: Standard deviation of `before`, used if that is too short to tell it.
        noise: Deviations of earlier values from their own level: they tell how noise is correlated,
            which depends on the machine, not on the level, if `before` is short.
    """
    center = median(before)
    shift = abs(median(after) - center)
    spread = scale if len(before) < _FEW else robust_scale(before)
    error = math.sqrt(0.5 * math.pi) * spread * math.sqrt(1.0 / len(before) + 1.0 / len(after))
    error *= _stray([*noise, *(value - center for value in before)])
    error *= 1.0 + (_DOUBTFUL / len(before)) ** 2 if shift < _LARGE else 1.0
    return shift / error if error > 0.0 else math.inf


def _stray(values: Sequence[float]) -> float:
    """Return how many times farther means of these values stray than those of independent ones.

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


def without_warmup(values: Sequence[float]) -> Sequence[float]:
    """Return the values without the first ones that are too high for the noise of later ones."""
    settled = values[len(values) // 2 :]
    scale = max(_LEAST_WARMUP_SCALE, robust_scale(settled))
    highest = median(settled) + _WARMUP_DEVIATIONS * scale
    first = next(index for index, value in enumerate(values) if value <= highest)
    return values[first:]
