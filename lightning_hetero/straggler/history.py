"""A rank's memory of its own iterations, so that "slower" means slower than it was.

A rank's *pace* is its computing time, without waits, per unit of work: packed micro-batches differ
in work, and devices in pace. Each rank watches its own pace with its own detector. Its pace before
a fault stays the baseline until the fault ends, even if the rank moves to another place in the
plan: then it is told by which factor the places differ (`move`).
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_hetero.straggler.bocd import BocdConfig, BocdDetector, ChangePoint

__all__ = ["Observation", "RankHistory", "RankReport"]

_KEPT = 128
"""Iterations that are kept: the longest possible baseline."""
_NUM_FIRST = 3
"""Iterations after which a rank has a rough idea of its pace."""


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
    """Seconds of waiting for messages of each peer."""
    num_messages: Mapping[int, int] = field(default_factory=dict)
    """Number of messages from each peer."""
    num_bytes: Mapping[int, int] = field(default_factory=dict)
    """Bytes of the messages from each peer."""
    hidden_bytes: int = 0
    """Bytes of the largest hidden state received; 0 if none was."""

    @property
    def pace(self) -> float:
        """Seconds per unit of work, scaled to the whole model; NaN without work."""
        work = self.work * self.share
        return (self.forward_s + self.backward_s) / work if work > 0 else math.nan


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank's report when a cause is looked for."""

    global_rank: int
    slowness: float
    """Its pace now over its baseline; NaN if either is unknown."""
    pace: float
    """Its baseline: healthy seconds per unit of work, scaled to the whole model; NaN if unknown."""
    forward_share: float
    """Share of the forward passes in `pace`, 0 to 1."""
    work: float
    """Median work of a micro-batch."""
    num_microbatches: float
    """Median number of micro-batches of an iteration."""
    excess_wait_s: Mapping[int, float]
    """By peer, seconds per iteration that waiting for its messages takes longer than before."""
    num_messages: Mapping[int, float]
    """By peer, messages per iteration."""
    num_bytes: Mapping[int, float]
    """By peer, bytes per iteration."""
    hidden_bytes: int
    """Bytes of the largest hidden state received."""


class RankHistory:
    """One rank's memory of its iterations; doesn't communicate."""

    def __init__(self, global_rank: int, config: BocdConfig | None = None) -> None:
        self._rank = global_rank
        self._detector = BocdDetector(config)
        self._first_step: int | None = None
        self._kept: deque[tuple[Observation, float]] = deque(maxlen=_KEPT)
        self._baseline: tuple[Observation, ...] = ()
        self._factor = 1.0
        self._first_pace = math.nan

    def observe(self, observation: Observation) -> ChangePoint | None:
        """Take in an iteration; return the change of pace that it completes (see `step_of`)."""
        if self._first_step is None:
            self._first_step = observation.step
        pace = observation.pace * self._factor
        self._kept.append((observation, pace))
        return self._detector.update(pace)

    def load_s(self, observation: Observation) -> float:
        """Return the seconds that an iteration's work should take this rank; 0 without work.

        By the rank's first iterations, so only changes mean anything; NaN until there are enough.
        """
        if not observation.work:
            return 0.0
        if math.isnan(self._first_pace) and len(self._kept) >= _NUM_FIRST:
            self._first_pace = self._median([kept for kept, _ in self._kept], lambda o: o.pace)
        work = observation.work * observation.num_microbatches * observation.share
        return self._first_pace * work / self._factor

    def step_of(self, index: int) -> int:
        """Return the step that an index of a `ChangePoint` stands for."""
        return (self._first_step or 0) + index

    def settle(self, onset_step: int) -> None:
        """Take the iterations before a step as the baseline, unless there is a baseline already."""
        if not self._baseline:
            self._baseline = tuple(o for o, _ in self._kept if o.step < onset_step)

    def move(self, factor: float) -> None:
        """Note that the rank computes in another place of the plan from now on.

        Args:
            factor: Its healthy pace in its first place over that in the new one.
        """
        self._factor = factor

    def unsettle(self) -> None:
        """Drop the baseline: there was no fault."""
        self._baseline = ()

    def recover(self) -> None:
        """Forget the baseline and the iterations of the fault, which has ended."""
        self.unsettle()
        self._kept.clear()

    def report(self, since_step: int) -> RankReport:
        """Compare the iterations since a step with the baseline."""
        recent = [entry for entry in self._kept if entry[0].step >= since_step]
        median = self._median
        pace = median(self._baseline, lambda o: o.pace)
        forward_s = median(self._baseline, lambda o: o.forward_s)
        backward_s = median(self._baseline, lambda o: o.backward_s)
        now = [value for _, value in recent if math.isfinite(value)]
        peers = sorted({peer for observation, _ in recent for peer in observation.waits_s})

        def by_peer(counts: Callable[[Observation], Mapping[int, float]]) -> dict[int, float]:
            return {p: statistics.median(counts(o).get(p, 0) for o, _ in recent) for p in peers}

        waits_s = by_peer(lambda o: o.waits_s)
        return RankReport(
            global_rank=self._rank,
            slowness=statistics.median(now) / pace if now and pace > 0.0 else math.nan,
            pace=pace,
            forward_share=forward_s / (forward_s + backward_s) if pace > 0.0 else 1.0,
            work=median(self._baseline, lambda o: o.work),
            num_microbatches=median(self._baseline, lambda o: o.num_microbatches),
            excess_wait_s={
                peer: seconds
                - median(self._baseline, lambda o, peer=peer: o.waits_s.get(peer, 0.0), 0.0)  # type: ignore[misc]
                for peer, seconds in waits_s.items()
            },
            num_messages=by_peer(lambda o: o.num_messages),
            num_bytes=by_peer(lambda o: o.num_bytes),
            hidden_bytes=max((o.hidden_bytes for o in self._baseline), default=0),
        )

    @staticmethod
    def _median(
        observations: Sequence[Observation],
        value_of: Callable[[Observation], float],
        default: float = math.nan,
    ) -> float:
        values = [value for o in observations if math.isfinite(value := value_of(o))]
        return statistics.median(values) if values else default
