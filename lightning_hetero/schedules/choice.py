"""Which schedules there are to choose from, and how much room each may use."""

from lightning_hetero.core.reading.choices import Choice

__all__ = ["Schedule"]

_DEEP = 1.5
"""Micro-batches that a deep schedule may hold on each stage, as a multiple of their number."""


class Schedule(Choice):
    """How the passes of a pipeline's micro-batches are ordered."""

    AUTO = "auto"
    """"deep" where that saves at least 1 % of an iteration, else "1f1b"."""
    ONE_F_ONE_B = "1f1b"
    """One forward and one backward in turn."""
    SPLIT = "split"
    """Backward passes of linear layers are split; stages hold no more than under 1F1B."""
    DEEP = "deep"
    """The same, and stages run ahead: each holds up to 1.5 micro-batches a stage of the pipeline,
    as far as its memory allows, where 1F1B holds as many as stages follow."""

    @property
    def is_solved(self) -> bool:
        """Whether orders other than 1F1B's may run."""
        return self is not Schedule.ONE_F_ONE_B

    @property
    def least_gain(self) -> float:
        """Share of an iteration that a solved order must save over 1F1B to run instead."""
        return 0.01 if self is Schedule.AUTO else 0.0

    def most_held(self, stage_index: int, num_stages: int, room: float) -> float:
        """Return the micro-batches that a stage may hold, if its memory has room for so many.

        As many as under 1F1B fit in any case.
        """
        usual = num_stages - stage_index
        return usual if self is Schedule.SPLIT else max(usual, min(_DEEP * num_stages, room))
