"""Watch the speed of each rank and of the run, compared with their earlier speed.

A rank's *pace* is its computing time, without waits, per unit of work; times alone can't be
compared, because packed micro-batches differ in work. Each rank watches its own pace
(`RankHistory`). One rank, the leader, watches the run's *level*: iteration times divided by the
time that their work should take (`LevelWatch`). A slow rank's pace changes before the run's level
does. And if other ranks have taken over its work, its recovery doesn't change the level, so only
its pace shows it. Until a fault ends, the pace before the fault is the baseline. If the rank moves
to another place in the plan meanwhile, `move` gets the ratio of the two places' paces.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from lightning_hetero.core.arrays import FloatArray
from lightning_hetero.straggler.bocd import BocdDetector
from lightning_hetero.straggler.events import ChangeEvent, ChangeKind

_KEPT = 128
"""Number of iterations that are remembered, so the longest possible baseline."""
_NUM_FIRST = 3
"""Number of iterations after which a rank's pace is roughly known."""
_UP = 1.05
"""Factor by which iterations must have become longer for a slower rank to matter."""
_PATIENCE = 8
"""Number of steps within which a slower rank must begin to matter; else it is ignored."""
_RECENT = 4
"""Number of newest iterations that show whether times have risen; changes closer together than that
count as one."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One rank's view of one iteration."""

    step: int
    forward_s: float = math.nan
    """Mean seconds of a micro-batch's forward without waits; NaN if the rank computed none."""
    backward_s: float = 0.0
    """The same for its backward; 0 if only forwards can be timed."""
    work: float = 1.0
    """Mean work of a micro-batch, in any unit that is the same in all iterations."""
    num_microbatches: int = 1
    share: float = 1.0
    """The rank's share of the model, which changes with the plan."""
    waits_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds of waiting for messages from each peer."""
    hidden_bytes: int = 0
    """Bytes of the largest hidden state received; 0 if none was."""

    @property
    def pace(self) -> float:
        """Seconds per unit of work, scaled to the whole model; NaN without work."""
        work = self.work * self.share
        return (self.forward_s + self.backward_s) / work if work > 0 else math.nan

    @classmethod
    def usual(cls, observations: Sequence["Observation"]) -> "Observation | None":
        """Return the medians of some observations; None without any."""
        if not observations:
            return None
        return cls(
            step=observations[-1].step,
            forward_s=_median(o.forward_s for o in observations),
            backward_s=_median(o.backward_s for o in observations),
            work=_median(o.work for o in observations),
            num_microbatches=round(_median(o.num_microbatches for o in observations)),
            waits_s=_usual_waits_s(observations),
            hidden_bytes=max(o.hidden_bytes for o in observations),
        )


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank's report for a diagnosis."""

    global_rank: int
    slowness: float = math.nan
    """Its present pace divided by its baseline; NaN if either is unknown."""
    pace: float = math.nan
    """Its baseline: healthy seconds per unit of work, scaled to the whole model; NaN if unknown."""
    before: Observation | None = None
    """Medians of its baseline."""
    excess_wait_s: Mapping[int, float] = field(default_factory=dict)
    """By peer, by how many seconds per iteration the wait for its messages has become longer."""


class RankNote(NamedTuple):
    """One rank's note of one iteration, in numbers, which travel as a row of floats.

    All ranks' notes form an array, (num_ranks, num_fields), which rank 0 reads by columns: a few
    passes over num_ranks numbers per iteration.
    """

    iteration_s: float
    load_s: float
    """Seconds that its work should take to compute; NaN if unknown, 0 for a rank without work."""
    change: float = 0.0
    """A change of this rank's pace that was found just now: 1 slower, -1 faster, 0 none."""
    onset_step: float = 0.0
    before: float = 0.0
    """Pace before the change."""
    after: float = 0.0


class RankHistory:
    """One rank's memory of its iterations; doesn't communicate."""

    def __init__(self, global_rank: int) -> None:
        self._rank = global_rank
        self._detector = BocdDetector()
        self._kept: deque[tuple[Observation, float]] = deque(maxlen=_KEPT)
        self._baseline: tuple[Observation, ...] = ()
        self._factor = 1.0
        self._first_pace = math.nan

    def observe(self, observation: Observation, iteration_s: float) -> RankNote:
        """Record an iteration; return its note for the leader."""
        pace = observation.pace * self._factor
        self._kept.append((observation, pace))
        seconds = iteration_s, self.load_s(observation)
        change = self._detector.update(pace, observation.step)
        if change is None:
            return RankNote(*seconds)
        sign = 1.0 if change.kind is ChangeKind.SLOWDOWN else -1.0
        return RankNote(*seconds, sign, change.onset_step, change.before, change.after)

    def load_s(self, observation: Observation) -> float:
        """Return the seconds that an iteration's work should take this rank; 0 without work.

        It is computed from the pace of the rank's first iterations, so only its changes mean
        anything. NaN until that pace is known.
        """
        if not observation.work:
            return 0.0
        if math.isnan(self._first_pace) and len(self._kept) >= _NUM_FIRST:
            self._first_pace = _median(kept.pace for kept, _ in self._kept)
        work = observation.work * observation.num_microbatches * observation.share
        return self._first_pace * work / self._factor

    def settle(self, onset_step: int) -> None:
        """Make the iterations before a step the baseline, unless there is a baseline already."""
        if not self._baseline:
            self._baseline = tuple(o for o, _ in self._kept if o.step < onset_step)

    def move(self, factor: float) -> None:
        """Note that the rank computes in another place of the plan from now on.

        Args:
            factor: Its healthy pace in its first place divided by that in the new one.
        """
        self._factor = factor

    def forget(self, *, baseline_only: bool = False) -> None:
        """Forget a fault that has ended, and its iterations; or only the baseline."""
        self._baseline = ()
        if not baseline_only:
            self._kept.clear()

    def report(self, since_step: int) -> RankReport:
        """Compare the iterations since a step with the baseline."""
        recent = [entry for entry in self._kept if entry[0].step >= since_step]
        pace, now = _median(o.pace for o in self._baseline), _median(value for _, value in recent)
        before, waits_s = _usual_waits_s(self._baseline), _usual_waits_s([o for o, _ in recent])
        return RankReport(
            global_rank=self._rank,
            slowness=now / pace if pace > 0.0 else math.nan,
            pace=pace,
            before=Observation.usual(self._baseline),
            excess_wait_s={peer: s - before.get(peer, 0.0) for peer, s in waits_s.items()},
        )


def _usual_waits_s(observations: Sequence[Observation]) -> dict[int, float]:
    """Return the median seconds of waiting for each peer."""
    peers = {peer for o in observations for peer in o.waits_s}
    return {p: statistics.median(o.waits_s.get(p, 0.0) for o in observations) for p in peers}


def _median(values: Iterable[float]) -> float:
    """Return the median of the finite values; NaN without any."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan


class _Iteration(NamedTuple):
    """A summary of all ranks' notes of one iteration."""

    step: int
    seconds: float
    load_s: float
    """The largest `load_s` of any rank; NaN if unknown."""
    work_s: float
    """The sum of all ranks' `load_s`, which depends less on how work is divided."""

    @property
    def value(self) -> float:
        """The iteration's time divided by the time its work should take; NaN if unknown."""
        return self.seconds / self.load_s if self.load_s > 0.0 else math.nan


class LevelWatch:
    """The leader's memory of all ranks' notes."""

    def __init__(self) -> None:
        self._detector = BocdDetector()
        self._kept: deque[_Iteration] = deque(maxlen=_KEPT)
        self._rank_change: ChangeEvent | None = None

    def before_s(self, step: int) -> float:
        """Return the seconds of an iteration with usual work before a step; NaN if unknown."""
        return self._usual_s([item for item in self._kept if item.step < step])

    def since_s(self, step: int) -> float:
        """Return the seconds of an iteration with usual work from a step on; NaN if unknown."""
        return self._usual_s([item for item in self._kept if item.step >= step])

    def _usual_s(self, iterations: Sequence[_Iteration]) -> float:
        """Return a median that doesn't depend on which iterations had more work."""
        load_s = _median(item.load_s for item in self._kept if math.isfinite(item.value))
        usual_s = _median(item.value for item in iterations) * load_s
        return usual_s if math.isfinite(usual_s) else _median(i.seconds for i in iterations)

    def skip(self, step: int, notes: FloatArray) -> float:
        """Ignore an iteration's time, for instance because plans change, but not ranks' changes.

        Returns:
            The seconds that it would have taken with the usual work.
        """
        self._detector.update(math.nan, step)
        found = self._read(step, notes)
        usual_s = _median(item.work_s for item in self._kept if item.work_s > 0.0)
        return found.seconds * (usual_s / found.work_s if usual_s > 0.0 < found.work_s else 1.0)

    def see(
        self, step: int, notes: FloatArray, *, last: ChangeEvent | None, is_known: bool
    ) -> ChangeEvent | None:
        """Record an iteration; return the change that it completes and that matters, or None.

        Args:
            step: The iteration.
            notes: All ranks' notes, see `RankNote`.
            last: The previous change.
            is_known: Whether a fault is known; else a rank's change matters only if iterations have
                become longer.
        """
        found = self._read(step, notes)
        self._kept.append(found)
        change = self._detector.update(found.value, step)
        return change or self._take_rank_change(step, last, is_known=is_known)

    def settle(self, *, forgets: bool) -> None:
        """Begin a new level with the next iteration; also forget the iterations that were seen."""
        self._detector.reset()
        if forgets:
            self._kept.clear()

    def _read(self, step: int, notes: FloatArray) -> _Iteration:
        """Return a summary of notes; remember the largest change of a pace until it matters."""
        (changed,) = notes[:, 2].nonzero()
        if changed.size:
            sizes = np.abs(np.log(notes[changed, 5] / notes[changed, 4]))
            rank = int(changed[sizes.argmax()])
            _, _, sign, onset_step, before, after = notes[rank].tolist()
            self._rank_change = ChangeEvent(
                step=step,
                onset_step=int(onset_step),
                kind=ChangeKind.SLOWDOWN if sign > 0 else ChangeKind.RECOVERY,
                before=before,
                after=after,
                where=f"rank {rank}",
            )
        seconds, loads_s = float(notes[:, 0].max()), notes[:, 1]
        return _Iteration(step, seconds, float(loads_s.max()), float(loads_s.sum()))

    def _take_rank_change(
        self, step: int, last: ChangeEvent | None, *, is_known: bool
    ) -> ChangeEvent | None:
        """Return a rank's change once it matters; drop it if it doesn't soon."""
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
        return bool(before) and _median(recent) > _UP * _median(before)
