"""Estimate arrangements, and simulate the likeliest: the candidates of a search."""

import bisect
import heapq
from collections.abc import Callable, Sequence

from lightning_hetero.planner.arrangement import Arrangement
from lightning_hetero.planner.estimating.arrangement_estimator import Estimate
from lightning_hetero.planner.estimating.estimator import Estimator
from lightning_hetero.planner.improving.local_search import WORTH_IMPROVING, has_equal_shares
from lightning_hetero.planner.judge import Candidate, Judge
from lightning_hetero.planner.parts import WORTH_SIMULATING

__all__ = ["Shortlist"]


class Shortlist:
    """What one search knows of arrangements by estimates, and by simulations of the likeliest.

    Args:
        estimators: For equal shares, and for unequal ones if they are allowed.
        judge: Simulates.
        weigh: Returns the score of an arrangement that takes so many seconds.
    """

    def __init__(
        self,
        estimators: Sequence[Estimator],
        judge: Judge,
        weigh: Callable[[float, Arrangement], float],
    ) -> None:
        self._estimators = tuple(estimators)
        self._judge = judge
        self._weigh = weigh
        self._best = dict.fromkeys(self._estimators, float("inf"))
        """The best score so far of what each of them allows."""
        self.likely: dict[Arrangement, float] = {}
        """Scores, or estimates of them."""
        self.num_estimated = 0

    @property
    def best(self) -> float:
        """The best score so far; infinite before there is any."""
        return self._best[self._estimators[-1]]

    def simulate(
        self,
        arrangements: Sequence[Arrangement],
        most: int,
        budget: int,
        below: float = float("inf"),
    ) -> list[Candidate]:
        """Return the candidates that fit, best first, after simulating the likeliest.

        Equal shares are tried as well, as if they alone were allowed.
        """
        self.num_estimated += len(arrangements)
        fitting: list[Candidate] = []
        for estimator in self._estimators:
            limit = min(below, self._best[estimator])
            fitting += self._simulate_by(estimator, arrangements, most, budget, limit)
        return sorted(dict.fromkeys(fitting), key=self._judge.score)

    def _simulate_by(
        self,
        estimator: Estimator,
        arrangements: Sequence[Arrangement],
        most: int,
        budget: int,
        below: float,
    ) -> list[Candidate]:
        """Return candidates of an estimator that fit.

        Simulated are the `most` likeliest, all that are estimated below the best of them, and of
        each number of pipelines the best that comes near it. Stops at estimates far above `below`.
        """
        limit, worst = self._judge.work_done + budget, below * WORTH_SIMULATING
        fitting: list[Candidate] = []
        best = float("inf")
        seen: set[object] = set()
        numbers: set[int] = set()
        for estimate in self._estimate(arrangements, estimator, most, worst):
            score, number = self.rough_score(estimate), len(estimate.arrangement)
            enough = len(fitting) >= most
            is_far = score > worst or (enough and score > best * WORTH_SIMULATING)
            if is_far or (self._judge.work_done > limit and fitting):
                break
            # What differs in nodes alone, and takes as long, is simulated once.
            kind = (score, *sorted(self._estimators[-1].keys(estimate.arrangement)))
            if kind in seen or (enough and score >= best and number in numbers):
                continue
            seen.add(kind)
            both = [Candidate.of(one) for one in (estimate, estimate.otherwise) if one]
            candidate = min(both, key=self._judge.score)
            simulated = self._judge.score(candidate)
            if simulated < float("inf"):
                self._note_score(candidate, simulated)
                fitting.append(candidate)
                numbers.add(number)
                best = min(best, simulated)
                self._judge.is_recomputing |= estimate.is_recomputing
        return fitting

    def _note_score(self, candidate: Candidate, score: float) -> None:
        for estimator, best in self._best.items():
            if score < best and (not estimator.equal_microbatches or has_equal_shares(candidate)):
                self._best[estimator] = score

    def glance(self, arrangements: Sequence[Arrangement], worst: float) -> float:
        """Return the best estimate; infinite if none fits, or none is below `worst`."""
        self.num_estimated += len(arrangements)
        estimates = self._estimate(arrangements, self._estimators[-1], 1, worst)
        return self.rough_score(estimates[0]) if estimates else float("inf")

    def rough_score(self, estimate: Estimate) -> float:
        """Return the score of an estimate."""
        return self._weigh(estimate.time_s, estimate.arrangement)

    def _estimate(
        self, arrangements: Sequence[Arrangement], estimator: Estimator, most: int, worst: float
    ) -> list[Estimate]:
        """Return the best estimates first: `most` of them, all that are near the best, and others.

        Arrangements that would take too long even without bubbles and exchange are left out, and
        those that would then score above `worst`: each by its work first.
        """
        bounds = (estimator.least_work_s, estimator.least_s)
        estimates: list[tuple[float, int, Estimate]] = []
        heap = [(0.0, index, 0) for index in range(len(arrangements))]
        while heap:
            least, index, number = heapq.heappop(heap)
            if len(estimates) >= most:
                near = max(estimates[most - 1][0], estimates[0][0] * WORTH_IMPROVING)
                worst = min(worst, near)
            if least > worst:
                break
            arrangement = arrangements[index]
            if number < len(bounds):
                score = self._weigh(bounds[number](arrangement), arrangement)
                heapq.heappush(heap, (max(score, least), index, number + 1))
                continue
            below_s = worst / self._weigh(1.0, arrangement)
            estimate = estimator.estimate(arrangement, below_s)
            if estimate is not None:
                score = self.rough_score(estimate)
                bisect.insort(estimates, (score, index, estimate))
                known = self.likely.get(estimate.arrangement, score)
                self.likely[estimate.arrangement] = min(known, score)
        return [estimate for _, _, estimate in estimates]
