"""Which schedules there are to choose from, and how much room each may use."""

from collections.abc import Sequence

from lightning_hetero.core.reading.choices import Choice

__all__ = ["Schedule"]

_DEPTHS = 1.5, 2.0, 3.0, 4.0
"""Micro-batches that a deep schedule may hold on each stage, as multiples of their number."""


class Schedule(Choice):
    """How the passes of a pipeline's micro-batches are ordered."""

    AUTO = "auto"
    """"deep" where that saves at least 1 % of an iteration, else "1f1b"."""
    ONE_F_ONE_B = "1f1b"
    """One forward and one backward in turn."""
    SPLIT = "split"
    """Backward passes of linear layers are split; stages hold no more than under 1F1B."""
    DEEP = "deep"
    """The same, and stages run ahead where that saves time: each holds up to four micro-batches a
    stage of the pipeline, as far as its memory allows; 1F1B holds as many as stages follow."""

    @property
    def is_solved(self) -> bool:
        """Whether orders other than 1F1B's may run."""
        return self is not Schedule.ONE_F_ONE_B

    @property
    def least_gain(self) -> float:
        """Share of an iteration that a solved order must save over 1F1B to run instead."""
        return 0.01 if self is Schedule.AUTO else 0.0

    def rooms(self, memory: Sequence[float]) -> list[tuple[float, ...]]:
        """Return how many micro-batches each stage may hold: choices, the smallest first.

        Args:
            memory: How many each stage's memory has room for; as many as under 1F1B in any case.
        """
        num_stages = len(memory)
        usual = tuple(map(float, range(num_stages, 0, -1)))
        if self is Schedule.SPLIT:
            return [usual]
        deep = [
            tuple(map(max, usual, (min(depth * num_stages, most) for most in memory)))
            for depth in _DEPTHS
        ]
        return list(dict.fromkeys([usual, *deep]))
