"""Local search on the simulator: move a layer, a micro-batch or a stage, keep what is faster.

So do pipelines and stages that idle devices get, or whose devices become idle.

Balancing and sharing are exact for their own objectives, but neither sees warm-up, links, gradient
exchange and memory together; the simulator does. Moves are tried in a fixed order and the first
that helps is kept, until none helps or the budget is spent. Where that ends depends on where it
begins and on the order, so many plans are moved a little, in two orders, and the best of them to
the end.
"""

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
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
"""Plans that are improved whatever that takes; others as long as there is work left:"""
_WORK = 240_000
_WORK_EQUAL = 160_000
_WORK_AT_FIRST = 20_000
"""Of a plan that is then improved further only if it is among the best."""
_WORK_OF_A_PLAN = 60_000
_MOST_BUDGETS = 5
_LONGEST_ADDED = 8
"""Stages of pipelines that idle devices get."""
_WORTH_GOING_ON = 0.002
"""A budget that gained so large a share is followed by another."""


def improve_best(
    candidates: Sequence[Candidate],
    judge: Judge,
    estimators: Sequence[Estimator],
) -> list[Candidate]:
    """Return the candidates and improved ones, best first.

    What can be had with equal shares is improved first, with equal shares.

    Args:
        candidates: Candidates that fit.
        judge: Scores them.
        estimators: For equal shares, and for unequal ones if they are allowed.
    """
    found = list(candidates)
    begun: set[Candidate] = set()
    for estimator in estimators:
        equal = estimator.equal_microbatches
        work, start = _WORK_EQUAL if equal else _WORK, judge.work_done
        open_to_it = [item for item in found if not equal or _has_equal_shares(item)]
        moved: dict[Candidate, None] = {}
        for candidate in _worth_improving(open_to_it, judge):
            if len(moved) >= _IMPROVED and judge.work_done > start + work // 2:
                break
            if candidate in begun:
                continue
            begun.add(candidate)
            for moves in _ORDERS:
                moved[_improve_by(moves, candidate, judge, estimator, _WORK_AT_FIRST)] = None
        for number, candidate in enumerate(sorted(moved, key=judge.score)):
            if number < _IMPROVED or judge.work_done < start + work:
                found.append(_improve_on(candidate, judge, estimator))
        found += moved
    return sorted(dict.fromkeys(found), key=judge.score)


def _improve_on(candidate: Candidate, judge: Judge, estimator: Estimator) -> Candidate:
    """Return the candidate improved for as many budgets as gain something."""
    best = candidate
    for _ in range(_MOST_BUDGETS):
        score = judge.score(best)
        best = improve(best, judge, estimator, budget=_WORK_OF_A_PLAN)
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
    """Return the candidate after all moves that help, within a budget of work.

    First it gets or loses devices, within another budget. The estimator says whether pipelines must
    run equal shares.
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
                found = judge.better(moved, estimator, below=enough)
                if found:
                    best, score, improved = found, judge.score(found), True
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
    idle = _idle(candidate, estimator)
    degrees = {degree for pipeline in candidate.arrangement for degree in pipeline.tp_degrees}
    classes = dict.fromkeys(estimator.classes)
    for kind, degree in itertools.product(classes, sorted(degrees)):
        units = _units(idle, kind, degree, estimator)
        for length in range(1, min(len(units), _LONGEST_ADDED) + 1):
            starts = range(0, len(units) - length + 1, length)
            yield _arranged([*rows, *(units[start : start + length] for start in starts)])


def _add_stages(candidate: Candidate, estimator: Estimator) -> Iterator[Arrangement]:
    """Give idle devices of a kind to the pipelines that are alike, or one: a stage at an end."""
    idle = _idle(candidate, estimator)
    degrees = {degree for pipeline in candidate.arrangement for degree in pipeline.tp_degrees}
    for members in _members(candidate, estimator):
        for kind, degree in itertools.product(dict.fromkeys(estimator.classes), sorted(degrees)):
            units = _units(idle, kind, degree, estimator)
            for number in dict.fromkeys([len(members), 1]):
                for is_first in (True, False) if number <= len(units) else ():
                    rows = [list(pipeline.stages) for pipeline in candidate.arrangement]
                    for member, unit in zip(members[:number], units, strict=False):
                        rows[member].insert(0 if is_first else len(rows[member]), unit)
                    yield _arranged(rows)


def _drop_stages(candidate: Candidate, estimator: Estimator) -> Iterator[Arrangement]:
    """Leave the devices of a stage idle in all pipelines that are alike, or one."""
    for members in _members(candidate, estimator):
        first = candidate.arrangement[members[0]]
        stages = [(estimator.classes[node], degree) for node, degree in first.stages]
        if len(stages) == 1:
            continue
        for s in {kind: s for s, kind in enumerate(stages)}.values():
            for number in dict.fromkeys([len(members), 1]):
                rows = [list(pipeline.stages) for pipeline in candidate.arrangement]
                for member in members[:number]:
                    rows[member].pop(s)
                yield _arranged(rows)


def _idle(candidate: Candidate, estimator: Estimator) -> list[int]:
    """Return the idle devices of each node."""
    idle = [node.count for node in estimator.cost.cluster.nodes]
    for node, degree in itertools.chain.from_iterable(p.stages for p in candidate.arrangement):
        idle[node] -= degree
    return idle


def _units(
    idle: Sequence[int], kind: int, degree: int, estimator: Estimator
) -> list[tuple[int, int]]:
    """Return the (node, devices) that idle devices of a kind make."""
    return [
        (node, degree)
        for node, count in enumerate(idle)
        if estimator.classes[node] == kind
        for _ in range(count // degree)
    ]


def _members(candidate: Candidate, estimator: Estimator) -> list[list[int]]:
    """Return indices of pipelines of one class, grouped."""
    return _grouped(estimator.keys(candidate.arrangement))


def _arranged(rows: Sequence[Sequence[tuple[int, int]]]) -> Arrangement:
    """Return an arrangement of (node, devices) of every stage."""
    return tuple(map(PipelineNodes.of_stages, rows))


def _alike(candidate: Candidate, estimator: Estimator) -> list[list[int]]:
    """Return indices of pipelines of one class, layers and micro-batches, grouped."""
    keys = estimator.keys(candidate.arrangement)
    return _grouped(zip(keys, candidate.layers, candidate.num_microbatches, strict=True))


def _grouped(kinds: Iterable[Hashable]) -> list[list[int]]:
    """Return the indices of each kind."""
    groups: dict[Hashable, list[int]] = {}
    for index, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(index)
    return list(groups.values())


_RESIZES = (_add_pipelines, _drop_pipelines, _add_stages, _drop_stages)
_MOVES = (
    _move_layers,
    _move_layers_together,
    _move_microbatches,
    _move_units,
    _swap_stages_together,
    _move_stages,
)
# The other way: layers are balanced anew where stages have swapped.
_ORDERS = (_MOVES, (_swap_stages_together, *_MOVES))
