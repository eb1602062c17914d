"""Local search on the simulator: move a layer, a micro-batch or a stage, keep what is faster.

So do pipelines that idle devices get, or whose devices become idle.

Balancing and sharing are exact for their own objectives, but neither sees warm-up, links, gradient
exchange and memory together; the simulator does. Moves are tried in one fixed order and the first
that helps is kept, until none helps or the budget is spent.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lightning_hetero.planner.arrangement import Arrangement, PipelineNodes
from lightning_hetero.planner.estimator import Estimator
from lightning_hetero.planner.judge import Candidate, Judge

__all__ = ["WORTH_IMPROVING", "improve", "improve_best"]

WORTH_IMPROVING = 1.03
"""A score may be so much above the best to be improved for its number of pipelines."""

_Family = Callable[[Candidate, Estimator], Iterator[Candidate | Arrangement]]
"""Moves of a candidate; where stages move, layers and micro-batches are to be found anew."""

_MIN_GAIN = 1e-9
_IMPROVED = 3
_IMPROVED_IF_TINY = 16
"""The same of clusters whose plans are simulated in a fraction of a millisecond."""
_IMPROVED_IF_CHEAP = 10
"""Plans that are improved where all of them take no more actions than one of them may."""
_ACTIONS = 100_000
_ACTIONS_EQUAL = 50_000
_MOST_BUDGETS = 5
_LONGEST_ADDED = 8
"""Stages of pipelines that idle devices get."""
_WORTH_GOING_ON = 0.002
"""A budget that gained so large a share is followed by another."""


def improve_best(
    candidates: Sequence[Candidate],
    judge: Judge,
    estimators: Sequence[Estimator],
    *,
    is_tiny: bool,
) -> list[Candidate]:
    """Return the candidates and improved ones, best first.

    What can be had with equal shares is improved first, with equal shares.

    Args:
        candidates: Candidates that fit.
        judge: Scores them.
        estimators: For equal shares, and for unequal ones if they are allowed.
        is_tiny: Whether the cluster is so small that more may be improved.
    """
    found = list(candidates)
    most = _IMPROVED_IF_TINY if is_tiny else _IMPROVED
    for estimator in estimators:
        equal = estimator.equal_microbatches
        budget = _ACTIONS_EQUAL if equal else _ACTIONS
        limit = judge.work_done + budget
        open_to_it = [item for item in found if not equal or _has_equal_shares(item)]
        chosen = _worth_improving(open_to_it, judge)[: max(most, _IMPROVED_IF_CHEAP)]
        for number, candidate in enumerate(chosen):
            if number < most or judge.work_done < limit:
                found.append(_improve_on(candidate, judge, estimator, budget))
    return sorted(dict.fromkeys(found), key=judge.score)


def _improve_on(candidate: Candidate, judge: Judge, estimator: Estimator, budget: int) -> Candidate:
    """Return the candidate improved for as many budgets as gain something."""
    best = candidate
    for _ in range(_MOST_BUDGETS):
        score, best = judge.score(best), improve(best, judge, estimator, budget=budget)
        if judge.score(best) > score * (1 - _WORTH_GOING_ON):
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


def _has_equal_shares(candidate: Candidate) -> bool:
    return max(candidate.num_microbatches) - min(candidate.num_microbatches) <= 1


def improve(candidate: Candidate, judge: Judge, estimator: Estimator, *, budget: int) -> Candidate:
    """Return the candidate after all moves that help, within `budget` simulated actions.

    First it gets or loses pipelines, within another budget. The estimator says whether pipelines
    must run equal shares.
    """
    resized = _improve_by(_RESIZES, candidate, judge, estimator, budget)
    return _improve_by(_MOVES, resized, judge, estimator, budget)


def _improve_by(
    families: Sequence[_Family],
    candidate: Candidate,
    judge: Judge,
    estimator: Estimator,
    budget: int,
) -> Candidate:
    best, score = candidate, judge.score(candidate)
    limit = judge.work_done + budget
    improved = True
    while improved:
        improved = False
        for family in families:
            for moved in family(best, estimator):
                if judge.work_done >= limit:
                    return best
                enough = score * (1 - _MIN_GAIN)
                found = judge.filled(moved, estimator, below=enough)
                if found and (moved_score := judge.score(found, below=enough)) < enough:
                    best, score, improved = found, moved_score, True
                    break
            if improved:
                break
    return best


def _move_layers(candidate: Candidate, estimator: Estimator) -> Iterator[Candidate]:
    """Give a layer of one stage to another, in all pipelines that are alike."""
    for members in _alike(candidate, estimator):
        layers = candidate.layers[members[0]]
        for source, target in itertools.permutations(range(len(layers)), 2):
            if layers[source] > 1:
                moved = list(layers)
                moved[source] -= 1
                moved[target] += 1
                rows = list(candidate.layers)
                for member in members:
                    rows[member] = tuple(moved)
                yield replace(candidate, layers=tuple(rows), estimate_s=0.0)


def _move_layers_together(candidate: Candidate, _estimator: Estimator) -> Iterator[Candidate]:
    """Give a layer of one stage to another in all pipelines of equal depth.

    Where cuts agree, gradients of a layer stay between the same nodes; moving one pipeline's cut
    alone would make them cross.
    """
    for length in sorted({len(layers) for layers in candidate.layers} - {1}):
        for source, target in itertools.permutations(range(length), 2):
            rows = []
            for layers in candidate.layers:
                moved = list(layers)
                if len(layers) == length and layers[source] > 1:
                    moved[source] -= 1
                    moved[target] += 1
                rows.append(tuple(moved))
            if tuple(rows) != candidate.layers:
                yield replace(candidate, layers=tuple(rows), estimate_s=0.0)


def _move_microbatches(candidate: Candidate, estimator: Estimator) -> Iterator[Candidate]:
    """Give a micro-batch of one pipeline to another."""
    if estimator.equal_microbatches:
        return
    firsts = [members[0] for members in _alike(candidate, estimator)]
    lasts = [members[-1] for members in _alike(candidate, estimator)]
    for source, target in itertools.product(firsts, lasts):
        if source != target and candidate.num_microbatches[source] > 1:
            counts = list(candidate.num_microbatches)
            counts[source] -= 1
            counts[target] += 1
            yield replace(candidate, num_microbatches=tuple(counts), estimate_s=0.0)


def _move_stages(candidate: Candidate, estimator: Estimator) -> Iterator[Arrangement]:
    """Let two stages swap their devices, then balance and share anew."""
    places = [
        (p, s)
        for p, pipeline in enumerate(candidate.arrangement)
        for s in range(len(pipeline.nodes))
    ]
    classes = estimator.classes
    seen: set[tuple[object, ...]] = set()
    for (p, s), (q, t) in itertools.combinations(places, 2):
        one, other = candidate.arrangement[p], candidate.arrangement[q]
        if one.stages[s] == other.stages[t]:
            continue
        kind = (
            (estimator.key(one), s, candidate.num_microbatches[p]),
            (estimator.key(other), t, candidate.num_microbatches[q]),
        )
        if classes[one.nodes[s]] == classes[other.nodes[t]] and kind in seen:
            continue
        seen.add(kind)
        rows = [list(pipeline.stages) for pipeline in candidate.arrangement]
        rows[p][s], rows[q][t] = rows[q][t], rows[p][s]
        yield _arranged(rows)


def _move_units(candidate: Candidate, estimator: Estimator) -> Iterator[Arrangement]:
    """Give a device group of one pipeline to another that has such degrees, then balance anew.

    It takes a place beside one of its kind, or any end where there is none.
    """
    classes = estimator.classes
    firsts = {
        estimator.key(pipeline): index for index, pipeline in enumerate(candidate.arrangement)
    }
    for p, q in itertools.permutations(firsts.values(), 2):
        one, other = candidate.arrangement[p], candidate.arrangement[q]
        if len(one.nodes) == 1:
            continue
        kinds = [[(classes[node], degree) for node, degree in i.stages] for i in (one, other)]
        for (kind, degree), s in {key: s for s, key in enumerate(kinds[0])}.items():
            if degree not in other.tp_degrees:
                continue
            alike = [t for t, key in enumerate(kinds[1]) if key == (kind, degree)]
            for place in [alike[-1] + 1] if alike else [0, len(other.nodes)]:
                rows = [list(pipeline.stages) for pipeline in candidate.arrangement]
                rows[q].insert(place, rows[p].pop(s))
                yield _arranged(rows)


def _swap_stages_together(candidate: Candidate, estimator: Estimator) -> Iterator[Arrangement]:
    """Let two stages swap devices in all pipelines that are alike, then balance and share anew.

    In one of them alone the gradients of layers would cross nodes.
    """
    classes = estimator.classes
    for key in dict.fromkeys(map(estimator.key, candidate.arrangement)):
        members = [p for p in candidate.arrangement if estimator.key(p) == key]
        if len(members) == 1:
            continue
        for s, t in itertools.combinations(range(len(members[0].nodes)), 2):
            one, other = members[0].stages[s], members[0].stages[t]
            if classes[one[0]] == classes[other[0]] and one[1] == other[1]:
                continue
            rows = [list(pipeline.stages) for pipeline in candidate.arrangement]
            for pipeline, row in zip(candidate.arrangement, rows, strict=True):
                if estimator.key(pipeline) == key:
                    row[s], row[t] = row[t], row[s]
            yield _arranged(rows)


def _drop_pipelines(candidate: Candidate, estimator: Estimator) -> Iterator[Arrangement]:
    """Leave the devices of a pipeline idle, or of all that are alike."""
    keys = estimator.keys(candidate.arrangement)
    rows = [pipeline.stages for pipeline in candidate.arrangement]
    for key in dict.fromkeys(keys):
        left = [row for row, other in zip(rows, keys, strict=True) if other != key]
        last = len(keys) - 1 - keys[::-1].index(key)
        for kept in dict.fromkeys([tuple(left), tuple(rows[:last] + rows[last + 1 :])]):
            if kept:
                yield _arranged(kept)


def _add_pipelines(candidate: Candidate, estimator: Estimator) -> Iterator[Arrangement]:
    """Give idle devices of a kind pipelines of their own, with a degree that others have."""
    rows = [pipeline.stages for pipeline in candidate.arrangement]
    idle = [node.count for node in estimator.cost.cluster.nodes]
    for node, degree in itertools.chain.from_iterable(rows):
        idle[node] -= degree
    degrees = {degree for pipeline in candidate.arrangement for degree in pipeline.tp_degrees}
    classes = dict.fromkeys(estimator.classes)
    for kind, degree in itertools.product(classes, sorted(degrees)):
        units = [
            (node, degree)
            for node, count in enumerate(idle)
            if estimator.classes[node] == kind
            for _ in range(count // degree)
        ]
        for length in range(1, min(len(units), _LONGEST_ADDED) + 1):
            starts = range(0, len(units) - length + 1, length)
            yield _arranged([*rows, *(units[start : start + length] for start in starts)])


def _arranged(rows: Sequence[Sequence[tuple[int, int]]]) -> Arrangement:
    """Return an arrangement of (node, devices) of every stage."""
    return tuple(map(PipelineNodes.of_stages, rows))


def _alike(candidate: Candidate, estimator: Estimator) -> list[list[int]]:
    """Return indices of pipelines of one class, layers and micro-batches, grouped."""
    groups: dict[tuple[object, ...], list[int]] = {}
    keys = estimator.keys(candidate.arrangement)
    kinds = zip(keys, candidate.layers, candidate.num_microbatches, strict=True)
    for index, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(index)
    return list(groups.values())


_RESIZES = (_add_pipelines, _drop_pipelines)
_MOVES = (
    _move_layers,
    _move_layers_together,
    _move_microbatches,
    _move_units,
    _swap_stages_together,
    _move_stages,
)
