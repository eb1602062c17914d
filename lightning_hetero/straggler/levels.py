"""Watch the level of a run, iteration times over what their work should take, and its ranks' paces.

One detector watches the run's level; each rank watches its own pace, and says in its note of an
iteration if that has changed. A rank's pace shows a change before the run does, and only the pace
shows that a slow rank has recovered after others have taken over its work.
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
"""How many times longer iterations must have become for a slower rank to matter."""
_PATIENCE = 8
"""Steps within which a slower rank must begin to matter, or is ignored."""
_RECENT = 4
"""Newest iterations that show if times have risen; onsets nearer than that are of one change."""


class RankNote(NamedTuple):
    """One rank's note of one iteration: numbers, which travel as a row of floats.

    All ranks' notes form an array, (num_ranks, num_fields), which rank 0 reads by columns: a few
    passes over num_ranks numbers per iteration.
    """

    iteration_s: float
    load_s: float
    """Seconds that its work should take to compute; NaN if unknown, 0 for a rank without work."""
    change: float = 0.0
    """A change of this rank's pace that was just found: 1 slower, -1 faster, 0 none."""
    onset_step: float = 0.0
    before: float = 0.0
    """Pace before the change."""
    after: float = 0.0

    @classmethod
    def of(
        cls, iteration_s: float, load_s: float, change: ChangePoint | None, onset_step: int
    ) -> Self:
        """Return the note of an iteration, with the change that the rank's detector found."""
        if change is None:
            return cls(iteration_s, load_s)
        sign = 1.0 if change.kind is ChangeKind.SLOWDOWN else -1.0
        return cls(iteration_s, load_s, sign, onset_step, change.before, change.after)


_ITERATION_S, _LOAD_S, _CHANGE, _, _BEFORE, _AFTER = range(len(RankNote._fields))
"""Columns of notes."""


def slowest_s(notes: FloatArray) -> float:
    """Return the seconds of an iteration: those of the slowest rank."""
    return float(notes[:, _ITERATION_S].max())


@dataclass(frozen=True, slots=True)
class _Iteration:
    """A summary of all ranks' notes of one iteration."""

    step: int
    seconds: float
    load_s: float
    """The largest `load_s` of any rank; NaN if unknown."""
    work_s: float
    """The sum of all ranks' `load_s`, which depends less on how work is divided."""

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
        """The iteration's time over what its work should take; NaN if unknown."""
        return self.seconds / self.load_s if self.load_s > 0.0 else math.nan


class LevelWatch:
    """The leader's memory of all ranks' notes."""

    def __init__(self, config: BocdConfig) -> None:
        self._config = config
        self._detector = BocdDetector(config)
        self._first_step: int | None = None
        self._kept: deque[_Iteration] = deque(maxlen=_KEPT)
        self._rank_change: ChangeEvent | None = None

    def before_s(self, step: int) -> float:
        """Return the seconds of an iteration with usual work before a step; NaN if unknown."""
        return self._usual_s([item for item in self._kept if item.step < step])

    def since_s(self, step: int) -> float:
        """Return the seconds of an iteration with usual work from a step on; NaN if unknown."""
        return self._usual_s([item for item in self._kept if item.step >= step])

    def _usual_s(self, iterations: Sequence[_Iteration]) -> float:
        """Return a median that doesn't depend on which of the iterations had more work."""
        values = [item.value for item in iterations if math.isfinite(item.value)]
        if values:
            loads_s = [item.load_s for item in self._kept if math.isfinite(item.value)]
            return statistics.median(values) * statistics.median(loads_s)
        return statistics.median(item.seconds for item in iterations) if iterations else math.nan

    def skip(self, step: int, notes: FloatArray) -> float:
        """Ignore an iteration's time, as while plans change, but not changes of ranks' paces.

        Returns:
            The seconds that it would have taken with the usual work.
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
            notes: All ranks' notes, see `RankNote`.
            last: The previous change.
            is_known: Whether a fault is known; else a rank's change matters only if iterations have
                become longer.
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
        """Begin a new level with the next iteration."""
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
