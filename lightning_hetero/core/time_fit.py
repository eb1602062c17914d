"""Fit the time of a micro-batch by its lengths: `T = a·Σl² + b·Σl + c` (Hydraulis Appendix B).

Both profiles and the assignment use this least-squares fit over measured micro-batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

__all__ = ["TimeFit"]

# Non-negative least squares over three columns: the best fit over all subsets of columns.
_COLUMN_CHOICES = ([1], [1, 2], [0, 1], [0, 1, 2], [0, 2], [0], [2])


@dataclass(frozen=True, kw_only=True)
class TimeFit:
    """T(l) = a·l² + b·l + c of one stage, forward and backward; c is paid once per micro-batch."""

    a: float
    """Seconds per squared token of a sequence."""
    b: float
    """Seconds per token."""
    c: float
    """Seconds per micro-batch."""

    def __call__(self, lengths: Sequence[int]) -> float:
        """Return the seconds of a micro-batch of sequences of these lengths."""
        squares = sum(length * length for length in lengths)
        return self.a * squares + self.b * sum(lengths) + self.c

    @classmethod
    def of(cls, samples: Sequence[tuple[Sequence[int], float]], *, needs_b: bool = False) -> Self:
        """Fit measured (lengths, seconds) by least squares of relative errors.

        Coefficients that would be negative are 0, and so are those that the samples can't tell
        apart: a single length can't show the square. With `needs_b`, b is above 0, even if the
        samples fit better without it.
        """
        features = np.array(
            [[sum(n * n for n in lengths), sum(lengths), 1.0] for lengths, _ in samples]
        )
        seconds = np.array([value for _, value in samples])
        weights = 1.0 / np.maximum(seconds, 1e-12)
        best, best_error = np.zeros(3), math.inf
        for columns in _COLUMN_CHOICES:
            chosen = features[:, columns]
            scale = np.abs(chosen).max(axis=0)
            system = chosen / scale * weights[:, None]
            if np.linalg.matrix_rank(system, tol=1e-6 * np.linalg.norm(system)) < len(columns):
                continue
            solution = np.linalg.lstsq(system, seconds * weights, rcond=None)[0]
            error = float(np.sum((system @ solution - seconds * weights) ** 2))
            if needs_b and not (1 in columns and solution[columns.index(1)] > 0):
                continue
            if np.all(solution >= 0) and error < best_error - 1e-12:
                best, best_error = np.zeros(3), error
                best[columns] = solution / scale
        return cls(a=float(best[0]), b=float(best[1]), c=float(best[2]))
