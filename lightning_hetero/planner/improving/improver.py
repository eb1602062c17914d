"""Improve the best plans of a search, and what searches find that may do less.

Where local search ends depends on where it begins. A search that may do less begins elsewhere, and
what it finds is open to the whole search as well: moves may give it all that was left out. So more
freedom, or another node, seldom makes the best plan slower.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from lightning_hetero.planner.estimating.estimator import Estimator
from lightning_hetero.planner.improving.local_search import (
    WORTH_ESCAPING,
    escape_optima,
    improve_best,
    improve_long,
)
from lightning_hetero.planner.judge import Candidate, Judge
from lightning_hetero.planner.parts import WORTH_SIMULATING, Part

__all__ = ["FindStarts", "Improver"]

FindStarts = Callable[[Sequence[Estimator], Part | None, float], list[Candidate]]
"""Returns the candidates, best first, that a search for some estimators, of a part or of all, would
improve, and of which none is far above a score."""
_IMPROVED_OF_A_PART = 2
_IMPROVED_LONGER = 4
_STARTS_IMPROVED_LONGER, _STARTS_OF_A_NUMBER, _WORTH_LONG = 8, 2, 1.1
"""Starts that get long budgets, of them with equally many pipelines, and the most that their scores
may be above the best one's."""
_MOST_SMALLER = 32
"""Parts, each smaller than the one before, that are searched while that leads to better plans."""


class Improver:
    """Improves candidates of one search.

    Args:
        judge: Scores them.
        estimators: For equal shares, and for unequal ones if they are allowed.
        keeping: The same as if recomputing freed no memory; used only once a plan recomputes.
        find_starts: Searches that may do less.
    """

    def __init__(
        self,
        judge: Judge,
        estimators: Sequence[Estimator],
        keeping: Sequence[Estimator],
        find_starts: FindStarts,
    ) -> None:
        self._judge = judge
        self._estimators = estimators
        self._keeping = keeping
        self._find_starts = find_starts

    def improve(self, candidates: Sequence[Candidate], effort: float) -> list[Candidate]:
        """Return the candidates and improved ones, best first; `effort` as in `improve_best`.

        Where plans recompute, also ones that moves lead to, candidates are also improved as if none
        could: other moves help then.
        """
        found = improve_best(candidates, self._judge, self._estimators, effort=effort)
        keeping = self._keeping_if_recomputing()
        if keeping:
            found = self._improve_as(keeping, found, candidates, effort / 2)
        return found

    def improve_with_less(self, found: Sequence[Candidate], effort: float) -> list[Candidate]:
        """Return what was found, and improved candidates of searches that may do less, best first.

        These are without recomputation, and with equal shares.
        """
        improved = list(found)
        for estimators in (self._keeping_if_recomputing(), self._estimators[:-1]):
            if estimators:
                starts = self._find_starts(estimators, None, float("inf"))
                improved = self._improve_as(estimators, improved, starts, effort)
        return improved

    def improve_with_fewer_degrees(
        self, found: Sequence[Candidate], effort: float
    ) -> list[Candidate]:
        """Return what was found, and improved candidates of searches of fewer degrees, best first.

        Left out is each TP degree of the best candidate but the least: with it, plans without it
        are seldom improved. And left out are all degrees above each one: they lead away from plans
        that don't use them. What comes near the best is also improved beyond local optima.
        """
        ranked, degrees = list(found), sorted(self._estimators[-1].tp_degrees)
        used = {degree for pipeline in found[0].arrangement for degree in pipeline.tp_degrees}
        without = [[d for d in degrees if d != out] for out in sorted(used.difference(degrees[:1]))]
        up_to = [degrees[:number] for number in range(2, len(degrees))]
        for rest in dict.fromkeys(map(tuple, [*without, *up_to])):
            pairs = zip(self._estimators, self._keeping, strict=True)
            fewer = {each.with_degrees(rest): keeping.with_degrees(rest) for each, keeping in pairs}
            self._judge.add(fewer)
            estimators = tuple(fewer)
            starts = self._find_starts(estimators, None, float("inf"))
            if not starts:
                continue
            other = Improver(self._judge, estimators, [*fewer.values()], self._find_starts)
            more, best = other.improve(starts, effort), self._judge.score(ranked[0])
            if self._judge.score(more[0]) <= best * WORTH_ESCAPING:
                more = escape_optima(more, self._judge, estimators)
            if self._judge.score(more[0]) < best:
                more += improve_best(more[:1], self._judge, self._estimators, effort=effort)
            ranked = self._ranked([*ranked, *more])
        return ranked

    def improve_parts(
        self,
        found: Sequence[Candidate],
        parts: Sequence[Part],
        smaller: Callable[[Part], Part | None],
    ) -> list[Candidate]:
        """Return what was found, and improved candidates of searches of parts, best first.

        Moves may take up the devices that a part lacks. Where a part leads to the best plan, so may
        a `smaller` one, and so on, up to 32 of them.
        """
        improved, best = list(found), self._judge.score(found[0])
        for first in parts:
            part: Part | None = first
            for _ in range(_MOST_SMALLER):
                if part is None:
                    break
                ranked = self._ranked([*improved, *self._improve_part(part, best)])
                is_ahead = self._judge.score(ranked[0]) < self._judge.score(improved[0])
                improved = ranked
                part = smaller(part) if is_ahead else None
        return improved

    def improve_starts(
        self, found: Sequence[Candidate], starts: Sequence[Candidate]
    ) -> list[Candidate]:
        """Return what was found, and likely starts improved with long budgets, best first.

        From a start that is 10 % slower than the best, moves may lead to a plan that they don't
        lead to from the best. Two of each number of pipelines are improved, eight in all; where
        plans recompute, as if none could.
        """
        keeping, worst = self._keeping_if_recomputing(), _WORTH_LONG * self._judge.score(found[0])
        of_number: Counter[int] = Counter()
        likely: list[Candidate] = []
        for start in self._ranked(starts):
            number = len(start.arrangement)
            of_number[number] += 1
            if of_number[number] <= _STARTS_OF_A_NUMBER and self._judge.score(start) <= worst:
                likely.append(start)
        estimator = (keeping or self._estimators)[-1]
        more = improve_long(likely, self._judge, estimator, most=_STARTS_IMPROVED_LONGER)
        return self._ranked([*found, *more])

    def improve_longer(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Return what was found, and the likeliest of it improved with long budgets, best first.

        As if shares were equal as well, and where plans recompute, as if none could.
        """
        ranked = list(found)
        ways = self._estimators, self._keeping_if_recomputing(), self._estimators[:-1]
        for estimators in filter(None, ways):
            ranked += improve_long(found, self._judge, estimators[-1], most=_IMPROVED_LONGER)
        return self._ranked(ranked)

    def _improve_part(self, part: Part, best: float) -> list[Candidate]:
        """Return the improved candidates of a part that begin near the `best` score, best first.

        Where plans recompute, they are improved as if none could, and the best of them freely; if
        none begins near the score so, all are freely.
        """
        worst = best * _WORTH_LONG
        for estimators in filter(None, (self._keeping_if_recomputing(), self._estimators)):
            starts = self._find_starts(estimators, part, worst / WORTH_SIMULATING)
            near = [item for item in starts if self._judge.score(item) <= worst]
            if near:
                break
        more = improve_long(near, self._judge, estimators[-1], most=_IMPROVED_OF_A_PART)
        more = self._ranked(more)
        is_free = estimators is self._estimators
        if not is_free and more and self._judge.score(more[0]) < best:
            more += improve_long(more[:1], self._judge, self._estimators[-1], most=1)
        return self._ranked(more)

    def _keeping_if_recomputing(self) -> Sequence[Estimator]:
        """Return estimators that recompute nothing; none if no plan recomputes."""
        return self._keeping if self._judge.is_recomputing else ()

    def _improve_as(
        self,
        estimators: Sequence[Estimator],
        found: Sequence[Candidate],
        candidates: Sequence[Candidate],
        effort: float,
    ) -> list[Candidate]:
        """Return what was found, and candidates improved as if less were allowed, best first.

        If these end ahead, they are improved freely as well.
        """
        if not candidates:
            return list(found)
        more = improve_best(candidates, self._judge, estimators, effort=effort)
        if self._judge.score(more[0]) < self._judge.score(found[0]):
            more += improve_best(more[:1], self._judge, self._estimators, effort=effort)
        return self._ranked([*found, *more])

    def _ranked(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return sorted(dict.fromkeys(candidates), key=self._judge.score)
