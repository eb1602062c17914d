"""Find where improving begins: propose arrangements, and simulate the likeliest.

All arrangements of tiny clusters are simulated, else what the solvers propose (`starting_points`):
for the whole cluster and, since devices may be in the way, for the likeliest parts of it (`parts`).
"""

from collections.abc import Callable, Sequence
from functools import cached_property

from lightning_hetero.planner.allowances import Scores
from lightning_hetero.planner.arrangement import Arrangement, used_counts
from lightning_hetero.planner.enumeration import enumerate_arrangements
from lightning_hetero.planner.estimating.estimator import Estimator
from lightning_hetero.planner.judge import Candidate, Judge
from lightning_hetero.planner.parts import WORTH_SIMULATING, LikelyParts, Part
from lightning_hetero.planner.result import ProgressCallback
from lightning_hetero.planner.shortlist import Shortlist
from lightning_hetero.planner.starting_points import (
    glance_at,
    propose_arrangements,
    propose_mixed_degrees,
    propose_wide_ends,
)

__all__ = ["Starts"]

_MAX_ENUMERATED = 12_000
_MAX_ENUMERATED_DEVICES = 6
_SIMULATED = 12
_SIMULATED_DEVICES = 600
"""Devices of all that are simulated on small clusters."""
_SIMULATED_WORK = 1_500_000  # about microseconds
_SIMULATED_OF_A_PART = 3
# Tiny clusters: plans are simulated in a fraction of a millisecond, and there are all of them.
_SIMULATED_ENUMERATED = 150


class Starts:
    """Finds the candidates that a search improves.

    Args:
        judge: Simulates.
        estimators: For equal shares, and for unequal ones if they are allowed.
        scores: The objective.
        weigh: Returns the score of an arrangement that takes so many seconds.
        progress: Told what is being done.
    """

    def __init__(
        self,
        judge: Judge,
        estimators: Sequence[Estimator],
        scores: Scores,
        weigh: Callable[[float, Arrangement], float],
        progress: ProgressCallback,
    ) -> None:
        self._judge, self._scores, self._weigh = judge, scores, weigh
        self._estimators = tuple(estimators)
        self._estimator = self._estimators[-1]
        self._degrees = self._estimator.tp_degrees
        self._cluster = self._estimator.cost.cluster
        self._counts = tuple([node.count for node in self._cluster.nodes])
        self._progress = progress
        self.shortlist = Shortlist(self._estimators, judge, weigh)

    @property
    def is_complete(self) -> bool:
        """Whether all arrangements there are have been proposed."""
        return self._every is not None

    @cached_property
    def _every(self) -> list[Arrangement] | None:
        """All arrangements of a tiny cluster; None if there are too many."""
        if sum(self._counts) > _MAX_ENUMERATED_DEVICES:
            return None
        return enumerate_arrangements(self._estimator, self._counts, self._degrees, _MAX_ENUMERATED)

    def find(self, below: float) -> list[Candidate]:
        """Return the candidates that fit, best first: of the cluster, then of parts of it.

        A part is looked at only where its devices could do better than the best so far, and nothing
        that is far above `below`.
        """
        every = self._every
        if every is not None:
            return self.shortlist.simulate(every, _SIMULATED_ENUMERATED, _SIMULATED_WORK, below)
        counts = self._counts
        most = max(_SIMULATED, _SIMULATED_DEVICES // sum(counts))
        parts = LikelyParts(
            self._cluster,
            [self._scores.burden(node, self._degrees) for node in range(len(counts))],
            least=lambda part: self._scores.least(part, self._degrees),
            glance=self.glance,
            progress=lambda share: self._progress("Leaving devices out", 0.4 + 0.1 * share),
        )
        found: list[Candidate] = []
        searched = {counts}
        for first in (parts.far_ahead(below), counts):
            if first is not None:
                searched.add(first)
                likely = min(parts.whole_score, below, self.shortlist.best)
                found += self._find_in(first, most, _SIMULATED_WORK, likely=likely, below=below)
        limit = self._judge.work_done + _SIMULATED_WORK
        for part in parts.likeliest(min(below, self.shortlist.best)):
            searched.add(part)
            budget = max(0, limit - self._judge.work_done)
            likely = min(below, self.shortlist.best)
            found += self._find_in(part, _SIMULATED_OF_A_PART, budget, likely=likely, below=below)
        if found:
            # Devices that the best leaves idle, as it is, aren't there for other proposals.
            used = used_counts(min(found, key=self._judge.score).arrangement, len(counts))
            if used not in searched:
                likely = min(below, self.shortlist.best)
                found += self._find_in(
                    used, _SIMULATED_OF_A_PART, _SIMULATED_WORK, likely=likely, below=below
                )
        return sorted(dict.fromkeys(found), key=self._judge.score)

    def find_with_less(
        self, estimators: Sequence[Estimator], part: Part | None, below: float
    ) -> list[Candidate]:
        """Return the candidates of other estimators, which allow less, best first.

        They are for the whole cluster, or for a part of it. Nothing that is far above `below` is
        looked for.
        """
        less = Starts(self._judge, estimators, self._scores, self._weigh, lambda *_: None)
        if part is None:
            found = less.find(below)
        else:
            found = less._find_in(part, _SIMULATED, _SIMULATED_WORK, likely=below, below=below)
            found.sort(key=self._judge.score)
        self.shortlist.num_estimated += less.shortlist.num_estimated
        return found

    def _find_in(
        self,
        counts: Sequence[int],
        most: int,
        budget: int,
        *,
        likely: float,
        below: float,
    ) -> list[Candidate]:
        """Return the candidates that fit of all proposals for some devices.

        A degree that can't come near a `likely` score by its work is no degree for all pipelines.
        """
        worst = likely * WORTH_SIMULATING
        alone = [tp for tp in self._degrees if self._scores.least(counts, [tp]) <= worst]
        every = propose_arrangements(self._estimator, counts, self._degrees, alone)
        found = self.shortlist.simulate(every, most, budget, below)
        for propose in (propose_mixed_degrees, propose_wide_ends):
            # Apart, so that none takes another one's place.
            more = propose(self._estimator, counts, self._degrees)
            found += self.shortlist.simulate(more, max(most // 2, 3), budget, below)
        return found

    def glance(self, part: Sequence[int], worst: float) -> tuple[float, int]:
        """Return the best estimate for some devices dealt evenly, and how many were looked at.

        Infinite if none fits or is below `worst`.
        """
        few = glance_at(self._estimator, part, self._degrees)
        return self.shortlist.glance(few, worst), len(few)
