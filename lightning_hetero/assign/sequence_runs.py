"""An iteration's sequences in runs of nearly equal length, longest first, for lower bounds."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from lightning_hetero.assign.pipeline_cost import CostTable
from lightning_hetero.core.arrays import FloatArray, IntArray

__all__ = ["SequenceRuns"]


@dataclass(frozen=True, kw_only=True)
class SequenceRuns:
    """R runs of sequences of nearly equal length, longest first, on K kinds of pipeline."""

    table: CostTable
    """The K kinds."""
    least: IntArray
    """[R] least length of each run."""
    counts: IntArray
    """[R] number of its sequences."""
    tokens: IntArray
    """[R] their tokens."""
    work_s: FloatArray
    """[R, K] seconds of a stage for them."""

    @classmethod
    def of(cls, lengths: IntArray, table: CostTable, *, spread: float = 0.03) -> Self:
        """Cut the sequences into runs.

        Lengths of a run differ by `spread` at most; the default costs bounds about nothing.
        """
        ordered = np.sort(lengths)[::-1]
        starts = [0]
        for index, length in enumerate(ordered.tolist()):
            if length < ordered[starts[-1]] * (1 - spread):
                starts.append(index)
        ends = np.array([*starts[1:], len(ordered)])
        return cls(
            table=table,
            least=ordered[ends - 1],
            counts=ends - np.array(starts),
            tokens=np.add.reduceat(ordered, starts),
            work_s=np.add.reduceat(table.times_s(ordered), starts, axis=0),
        )
