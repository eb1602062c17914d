"""Watch the level of a run: its iteration times over what their work should take, and its ranks.

The run's level is watched by one detector; each rank watches its own pace and says in its note of
an iteration when that has changed. A rank's pace shows a change before the run does, and it alone
shows that a slow rank recovered when others have long taken its work over.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np

from lightning_hetero.core.arrays import FloatArray
from lightning_hetero.straggler.bocd import BocdConfig, BocdDetector, ChangeKind, ChangePoint
from lightning_hetero.straggler.events import ChangeEvent

__all__ = ["LevelWatch", "RankNote", "slowest_s"]

_KEPT = 128
_UP = 1.05
"""How much longer iterations must have become for a slower rank to matter."""
_PATIENCE = 8
"""Steps for which a slower rank may begin to matter."""
_RECENT = 4
"""Iterations that tell whether they are up, and steps between two dates of one change."""


class RankNote(NamedTuple):
    """One rank's note of one iteration: numbers, which travel as a row of floats.

    All ranks' notes are an array, (num_ranks, num_fields): rank 0 looks through it by columns, so
    what it does for an iteration is a few passes over n numbers each.
    """

    iteration_s: float
    load_s: float
    """Seconds of computing that its work should be; NaN if unknown, 0 of a rank without work."""
    change: float = 0.0
    """Whether a change of this rank's pace has just been found: 1 slower, -1 faster, else 0."""
    onset_step: float = 0.0
    before: float = 0.0
    """Pace before."""
    after: float = 0.0

    @classmethod
    def of(
        cls, iteration_s: float, load_s: float, change: ChangePoint | None, onset_step: int
    ) -> Self:
        """Return the note of an iteration and of what the rank's own detector said."""
        if change is None:
            return cls(iteration_s, load_s)
        sign = 1.0 if change.kind is ChangeKind.SLOWDOWN else -1.0
        return cls(iteration_s, load_s, sign, onset_step, change.before, change.after)


_ITERATION_S, _LOAD_S, _CHANGE, _, _BEFORE, _AFTER = range(len(RankNote._fields))
"""Columns of notes."""


def slowest_s(notes: FloatArray) -> float:
    """Return what an iteration took, seconds: the most of all ranks."""
    return float(notes[:, _ITERATION_S].max())


@dataclass(frozen=True, slots=True)
class _Iteration:
    """All ranks' notes of one iteration."""

    step: int
    seconds: float
    load_s: float
    """The most computing that its work should be for a rank; NaN if unknown."""
    work_s: float
    """That of all ranks together; it depends less on who does the work."""

    @classmethod
    def of(cls, step: int, notes: FloatArray) -> Self:
        loads_s = notes[:, _LOAD_S]
        return cls(
            step=step,
            seconds=slowest_s(notes),
            load_s=float(loads_s.max()),  # NaN if any is.
            work_s=float(loads_s.sum()),
        )

    @property
    def value(self) -> float:
        """Its time over what its work should take; NaN if unknown."""
        return self.seconds / self.load_s if self.load_s > 0.0 else math.nan


class LevelWatch:
    """One rank's memory of all ranks' notes."""

    def __init__(self, config: BocdConfig) -> None:
        self._config = config
        self._detector = BocdDetector(config)
        self._first_step: int | None = None
        self._kept: deque[_Iteration] = deque(maxlen=_KEPT)
        self._rank_change: ChangeEvent | None = None

    def before_s(self, step: int) -> float:
        """Return what an iteration of usual work took before a step, seconds; NaN if unknown."""
        return self._usual_s([item for item in self._kept if item.step < step])

    def since_s(self, step: int) -> float:
        """Return what an iteration of usual work takes from a step on, seconds."""
        return self._usual_s([item for item in self._kept if item.step >= step])

    def _usual_s(self, iterations: Sequence[_Iteration]) -> float:
        """Return a median that doesn't depend on which of the iterations had more work."""
        values = [item.value for item in iterations if math.isfinite(item.value)]
        if values:
            loads_s = [item.load_s for item in self._kept if math.isfinite(item.value)]
            return statistics.median(values) * statistics.median(loads_s)
        return statistics.median(item.seconds for item in iterations) if iterations else math.nan

    def skip(self, step: int, notes: FloatArray) -> float:
        """Leave an iteration out whose time says nothing, but not what ranks say of their pace.

        Returns:
            What it would have taken with the usual work, seconds.
        """
        self._count(step, math.nan)
        self._note_rank_change(step, notes)
        found = _Iteration.of(step, notes)
        works_s = [item.work_s for item in self._kept if item.work_s > 0.0]
        if works_s and found.work_s > 0.0:
            return found.seconds * statistics.median(works_s) / found.work_s
        return found.seconds

    def see(
        self, step: int, notes: FloatArray, *, last: ChangeEvent | None, is_known: bool
    ) -> ChangeEvent | None:
        """Take in an iteration; return the change that it completes and that matters, if any.

        Args:
            step: The iteration.
            notes: Of all ranks, see `RankNote`.
            last: The change before.
            is_known: Whether a fault is known; else a rank's change matters if iterations are up.
        """
        found = _Iteration.of(step, notes)
        self._kept.append(found)
        self._note_rank_change(step, notes)
        change = self._count(step, found.value)
        if change is None:
            return self._take_rank_change(step, last, is_known=is_known)
        onset_step = (self._first_step or 0) + change.onset_step
        return ChangeEvent.from_change(change, step=step, onset_step=onset_step)

    def settle(self) -> None:
        """Take what comes next for a level of its own."""
        self._detector.reset()

    def forget(self) -> None:
        """Forget the iterations that were seen."""
        self._kept.clear()

    def _count(self, step: int, value: float) -> ChangePoint | None:
        if self._first_step is None:
            self._first_step = step
        return self._detector.update(value)

    def _note_rank_change(self, step: int, notes: FloatArray) -> None:
        """Keep the largest change of a rank's pace, until it matters."""
        (changed,) = notes[:, _CHANGE].nonzero()
        if not changed.size:
            return
        sizes = np.abs(np.log(notes[changed, _AFTER] / notes[changed, _BEFORE]))
        rank = int(changed[sizes.argmax()])
        note = RankNote(*notes[rank].tolist())
        self._rank_change = ChangeEvent(
            step=step,
            onset_step=int(note.onset_step),
            kind=ChangeKind.SLOWDOWN if note.change > 0 else ChangeKind.RECOVERY,
            ratio=note.after / note.before,
            before=note.before,
            after=note.after,
            confidence=self._config.change_probability,
            where=f"rank {rank}",
        )

    def _take_rank_change(
        self, step: int, last: ChangeEvent | None, *, is_known: bool
    ) -> ChangeEvent | None:
        event = self._rank_change
        if event is None or not (is_known or self._is_up()):
            return None
        self._rank_change = None
        is_late = step - event.step >= _PATIENCE and not is_known
        is_same = (
            last is not None
            and event.kind is last.kind
            and abs(event.onset_step - last.onset_step) < _RECENT
        )
        return None if is_late or is_same else replace(event, step=step)

    def _is_up(self) -> bool:
        values = [item.value for item in self._kept if math.isfinite(item.value)]
        before, recent = values[:-_RECENT], values[-_RECENT:]
        return bool(before) and statistics.median(recent) > _UP * statistics.median(before)
