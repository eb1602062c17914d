"""Local search on the simulator: move a little (`moves`), keep what is faster.

Balancing and sharing are exact for their own objectives, but neither sees warm-up, links, gradient
exchange and memory together; the simulator does. Moves are tried in a fixed order and the first
that helps is kept, or the best that gives, takes or cuts devices, until none helps or the budget is
spent. Where that ends depends on where it begins and on the order, so many plans are moved a
little, in two orders, and the best of them to the end. A thorough search also starts from plans
that are a move away from the best.
"""

import itertools
from collections.abc import Sequence

from lightning_hetero.planner.estimating.estimator import Estimator
from lightning_hetero.planner.improving.moves import MOVES, ORDERS, RESIZES, Family
from lightning_hetero.planner.judge import Candidate, Judge

__all__ = [
    "WORTH_ESCAPING",
    "WORTH_IMPROVING",
    "escape_optima",
    "has_equal_shares",
    "improve",
    "improve_best",
    "improve_long",
]

WORTH_ESCAPING = 1.06
"""A local optimum's score may be so much above the best one's."""
WORTH_IMPROVING = 1.03
"""A score may be so much above the best to be improved for its number of pipelines."""

_MIN_GAIN = 1e-9
_IMPROVED = 4
"""Plans that are improved whatever that takes; others as long as there is work left:"""
_WORK = 360_000
_WORK_EQUAL = 240_000
_WORK_AT_FIRST = 20_000
"""Of a plan that is then improved further only if it is among the best."""
_WORK_OF_A_PLAN = 60_000
_LONG_WORK_OF_A_PLAN = 300_000
"""The same where moves are so many that the usual budget ends long before all have been tried."""
_MOST_BUDGETS, _MOST_LONG_BUDGETS = 5, 6
_ESCAPES = 4
"""Local optima, of different arrangements, from which a way out is looked for."""
_WORTH_LEAVING_FOR = 1.1
"""A plan a move away from a local optimum may score so much above it."""
_WORK_OF_AN_ESCAPE = 1_200_000
_WORTH_GOING_ON = 0.002
"""A budget that gained so large a share is followed by another."""


def improve_best(
    candidates: Sequence[Candidate],
    judge: Judge,
    estimators: Sequence[Estimator],
    *,
    effort: float = 1,
) -> list[Candidate]:
    """Return the candidates and improved ones, best first.

    What can be had with equal shares is improved first, with equal shares.

    Args:
        candidates: Candidates that fit.
        judge: Scores them.
        estimators: For equal shares, and for unequal ones if they are allowed.
        effort: Factor on the plans that are improved and on the work that may take.
    """
    found = list(candidates)
    begun: set[Candidate] = set()
    for estimator in estimators:
        equal = estimator.equal_microbatches
        work, start = effort * (_WORK_EQUAL if equal else _WORK), judge.work_done
        moved: dict[Candidate, None] = {}
        for candidate in _worth_improving(_open_to(estimator, found), judge):
            if len(moved) >= effort * _IMPROVED and judge.work_done > start + work // 2:
                break
            if candidate in begun:
                continue
            begun.add(candidate)
            for moves in ORDERS:
                moved[_improve_by(moves, candidate, judge, estimator, _WORK_AT_FIRST)] = None
        for number, candidate in enumerate(sorted(moved, key=judge.score)):
            if number < effort * _IMPROVED or judge.work_done < start + work:
                found.append(_improve_on(candidate, judge, estimator))
        found += moved
    return sorted(dict.fromkeys(found), key=judge.score)


def improve_long(
    candidates: Sequence[Candidate], judge: Judge, estimator: Estimator, *, most: int
) -> list[Candidate]:
    """Return the likeliest candidates, `most` of them, improved with long budgets.

    Large clusters have so many moves that the budgets of `improve_best` end before a local optimum.
    """
    likeliest = _worth_improving(_open_to(estimator, candidates), judge)[:most]
    return [_improve_long(item, judge, estimator) for item in likeliest]


def escape_optima(
    ranked: Sequence[Candidate], judge: Judge, estimators: Sequence[Estimator]
) -> list[Candidate]:
    """Return candidates and what lies beyond the best local optima among them, best first.

    No move helps a local optimum, but from a plan a move away that is a little slower, moves may
    lead to a faster one (iterated local search). As in `improve_best`, equal shares come first.
    """
    found = list(ranked)
    for estimator in estimators:
        optima: dict[object, Candidate] = {}
        for item in sorted(_open_to(estimator, found), key=judge.score):
            optima.setdefault(tuple(sorted(judge.estimator.keys(item.arrangement))), item)
        likeliest = [*optima.values()][:_ESCAPES]
        for item in likeliest:
            if judge.score(item) <= judge.score(likeliest[0]) * WORTH_ESCAPING:
                found.append(_escape(item, judge, estimator))
    return sorted(dict.fromkeys(found), key=judge.score)


def _escape(candidate: Candidate, judge: Judge, estimator: Estimator) -> Candidate:
    """Return the best plan that is found from those a move away, again and again."""
    best, seen = candidate, {candidate}
    limit = judge.work_done + _WORK_OF_AN_ESCAPE
    while judge.work_done < limit:
        score = judge.score(best)
        near: dict[Candidate, None] = {}
        for moved in itertools.chain.from_iterable(m(best, estimator) for m in RESIZES + MOVES):
            if judge.work_done >= limit:
                break
            found = judge.better(moved, estimator, below=score * _WORTH_LEAVING_FOR)
            if found and found not in seen:
                near[found] = None
        seen |= near.keys()
        improved = (
            _improve_by(RESIZES + MOVES, other, judge, estimator, _WORK_AT_FIRST, seen)
            for other in sorted(near, key=judge.score)
            if judge.work_done < limit
        )
        better = min(improved, key=judge.score, default=best)
        if judge.score(better) >= score * (1 - _MIN_GAIN):
            break
        best = better
    return best


def _improve_on(candidate: Candidate, judge: Judge, estimator: Estimator) -> Candidate:
    """Return the candidate improved for as many budgets as gain something."""
    best = candidate
    for _ in range(_MOST_BUDGETS):
        score = judge.score(best)
        best = improve(best, judge, estimator, budget=_WORK_OF_A_PLAN)
        if judge.score(best) > score * (1 - _WORTH_GOING_ON):
            break
    return best


def _improve_long(candidate: Candidate, judge: Judge, estimator: Estimator) -> Candidate:
    """Return the candidate improved with long budgets, up to a local optimum if they suffice.

    A budget that gains little may be followed by one that gains much.
    """
    best = candidate
    for _ in range(_MOST_LONG_BUDGETS):
        before = best
        best = improve(best, judge, estimator, budget=_LONG_WORK_OF_A_PLAN)
        if best == before:
            break
    return best


def _worth_improving(candidates: Sequence[Candidate], judge: Judge) -> list[Candidate]:
    """Return candidates, only one of those that differ in nodes alone, the likeliest first.

    Most moves keep the number of pipelines, so the best of each number go first.
    """
    distinct: dict[object, Candidate] = {}
    firsts: dict[int, Candidate] = {}
    for candidate in sorted(candidates, key=judge.score):
        kind = tuple(sorted(judge.estimator.keys(candidate.arrangement)))
        distinct.setdefault(kind, candidate)
        firsts.setdefault(len(kind), candidate)
    worst = min(map(judge.score, candidates), default=0.0) * WORTH_IMPROVING
    near = [item for item in firsts.values() if judge.score(item) <= worst]
    return list(dict.fromkeys([*near, *distinct.values()]))


def _open_to(estimator: Estimator, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that have equal shares, or all if the estimator allows others."""
    return [
        item for item in candidates if not estimator.equal_microbatches or has_equal_shares(item)
    ]


def has_equal_shares(candidate: Candidate) -> bool:
    """Return whether all pipelines run as many micro-batches, but for one."""
    return max(candidate.num_microbatches) - min(candidate.num_microbatches) <= 1


def improve(candidate: Candidate, judge: Judge, estimator: Estimator, *, budget: int) -> Candidate:
    """Return the candidate after all moves that help, within a budget of work.

    First its devices are given, taken and cut otherwise, within another budget. The estimator says
    whether pipelines must run equal shares.
    """
    resized = _improve_by(RESIZES, candidate, judge, estimator, budget)
    return _improve_by(MOVES, resized, judge, estimator, budget)


def _improve_by(
    families: Sequence[Family],
    candidate: Candidate,
    judge: Judge,
    estimator: Estimator,
    budget: int,
    seen: set[Candidate] | None = None,
) -> Candidate:
    """Return the candidate after the moves that help; `seen` are those whose ways are known."""
    best, known = candidate, set() if seen is None else seen
    limit = judge.work_done + budget
    while judge.work_done < limit:
        moved = (_moved_by(family, best, judge, estimator, limit) for family in families)
        found = next(filter(None, moved), None)
        if found is None or found in known:
            break
        known.add(found)
        best = found
    return best


def _moved_by(
    family: Family, candidate: Candidate, judge: Judge, estimator: Estimator, limit: int
) -> Candidate | None:
    """Return the candidate after a move of a family that helps; None if none does.

    It is the first that helps. But of those that add or remove devices or change degrees it is the
    best: they are few, and one may take the devices that a better one needs.
    """
    best, score = None, judge.score(candidate)
    for moved in family(candidate, estimator):
        if judge.work_done >= limit:
            break
        found = judge.better(moved, estimator, below=score * (1 - _MIN_GAIN))
        if found:
            best, score = found, judge.score(found)
            if family not in RESIZES:
                break
    return best
