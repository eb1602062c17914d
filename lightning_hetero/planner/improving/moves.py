"""Moves of the local search: small changes of a candidate.

A layer or micro-batch goes to another stage or pipeline, or stages swap devices. Other moves change
which devices work, and how: idle ones become stages or pipelines, or the reverse; a stage or
pipeline of degree d becomes two of degree d/2, or two on the same node become one.
"""

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from lightning_hetero.planner.arrangement import (
    Arrangement,
    Group,
    MappingOrder,
    PipelineNodes,
    map_groups,
)
from lightning_hetero.planner.estimating.estimator import Estimator
from lightning_hetero.planner.judge import Candidate

__all__ = ["MOVES", "ORDERS", "RESIZES", "Family"]

Family = Callable[[Candidate, Estimator], Iterator[Candidate | Arrangement]]
"""Yields changed candidates, or arrangements for which layers and micro-batches must be found."""

_LONGEST_ADDED = 8
"""Most stages of a pipeline that is made of idle devices."""


def _move_layers(candidate: Candidate, estimator: Estimator) -> Iterator[Candidate]:
    """Move a layer from one stage to another, in all identical pipelines."""
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
    """Move a layer from one stage to another, in all pipelines of equal depth.

    If cuts agree, gradients of a layer stay between the same nodes; moving one pipeline's cut alone
    would make them cross.
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
    """Move a micro-batch from one pipeline to another."""
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
    """Swap the devices of two stages."""
    places = [
        (p, s)
        for p, pipeline in enumerate(candidate.arrangement)
        for s in range(len(pipeline.nodes))
    ]
    classes = estimator.classes
    seen: set[tuple[object, ...]] = set()
    for (p, s), (q, t) in itertools.combinations(places, 2):
        one, other = candidate.arrangement[p], candidate.arrangement[q]
        if (one.nodes[s], one.tp_degrees[s]) == (other.nodes[t], other.tp_degrees[t]):
            continue
        kind = (
            (estimator.key(one), s, candidate.num_microbatches[p]),
            (estimator.key(other), t, candidate.num_microbatches[q]),
        )
        if classes[one.nodes[s]] == classes[other.nodes[t]] and kind in seen:
            continue
        seen.add(kind)
        rows = _rows(candidate, {p, q})
        rows[p][s], rows[q][t] = rows[q][t], rows[p][s]
        yield _changed(candidate, rows)


def _move_units(candidate: Candidate, estimator: Estimator) -> Iterator[Arrangement]:
    """Move a stage's devices to another pipeline that has stages of this TP degree.

    They become the stage after the last one of their class and degree, or at an end without one.
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
                rows = _rows(candidate, (p, q))
                rows[q].insert(place, rows[p].pop(s))
                yield _changed(candidate, rows)


def _swap_stages_together(candidate: Candidate, estimator: Estimator) -> Iterator[Arrangement]:
    """Swap the devices of two stages in all pipelines of a class.

    A swap in one pipeline alone would make gradients cross nodes.
    """
    classes = estimator.classes
    for members in _members(candidate, estimator):
        if len(members) == 1:
            continue
        stages = candidate.arrangement[members[0]].stages
        for s, t in itertools.combinations(range(len(stages)), 2):
            one, other = stages[s], stages[t]
            if classes[one[0]] == classes[other[0]] and one[1] == other[1]:
                continue
            rows = _rows(candidate, members)
            for row in rows.values():
                row[s], row[t] = row[t], row[s]
            yield _changed(candidate, rows)


def _drop_pipelines(candidate: Candidate, estimator: Estimator) -> Iterator[Arrangement]:
    """Leave the devices of a pipeline idle, or of all pipelines of its class."""
    keys = estimator.keys(candidate.arrangement)
    rows = [pipeline.stages for pipeline in candidate.arrangement]
    for key in dict.fromkeys(keys):
        left = [row for row, other in zip(rows, keys, strict=True) if other != key]
        last = len(keys) - 1 - keys[::-1].index(key)
        for kept in dict.fromkeys([tuple(left), tuple(rows[:last] + rows[last + 1 :])]):
            if kept:
                yield _arranged(kept)


def _add_pipelines(candidate: Candidate, estimator: Estimator) -> Iterator[Arrangement]:
    """Make new pipelines of idle devices of one class."""
    rows = [pipeline.stages for pipeline in candidate.arrangement]
    idle = _idle(candidate, estimator)
    classes = dict.fromkeys(estimator.classes)
    for kind, degree in itertools.product(classes, estimator.tp_degrees):
        units = _units(idle, kind, degree, estimator)
        for length in range(1, min(len(units), _LONGEST_ADDED) + 1):
            starts = range(0, len(units) - length + 1, length)
            yield _arranged([*rows, *(units[start : start + length] for start in starts)])


def _add_stages(candidate: Candidate, estimator: Estimator) -> Iterator[Arrangement]:
    """Add a stage of idle devices at an end of all pipelines of a class, or of one of them."""
    idle = _idle(candidate, estimator)
    for members in _members(candidate, estimator):
        for kind, degree in itertools.product(
            dict.fromkeys(estimator.classes), estimator.tp_degrees
        ):
            units = _units(idle, kind, degree, estimator)
            for number in dict.fromkeys([len(members), 1]):
                for is_first in (True, False) if number <= len(units) else ():
                    rows = _rows(candidate, members[:number])
                    for row, unit in zip(rows.values(), units, strict=False):
                        row.insert(0 if is_first else len(row), unit)
                    yield _changed(candidate, rows)


def _drop_stages(candidate: Candidate, estimator: Estimator) -> Iterator[Arrangement]:
    """Leave the devices of a stage idle in all pipelines of a class, or in one of them."""
    for members in _members(candidate, estimator):
        first = candidate.arrangement[members[0]]
        stages = [(estimator.classes[node], degree) for node, degree in first.stages]
        if len(stages) == 1:
            continue
        for s in {kind: s for s, kind in enumerate(stages)}.values():
            for number in dict.fromkeys([len(members), 1]):
                rows = _rows(candidate, members[:number])
                for row in rows.values():
                    row.pop(s)
                yield _changed(candidate, rows)


def _split_stages(candidate: Candidate, estimator: Estimator) -> Iterator[Arrangement]:
    """Split a stage into two of half its degree, in all pipelines of a class or in one of them."""
    for members in _members(candidate, estimator):
        for s, degree in enumerate(candidate.arrangement[members[0]].tp_degrees):
            if not _can_halve(degree, estimator):
                continue
            for number in dict.fromkeys([len(members), 1]):
                rows = _rows(candidate, members[:number])
                for row in rows.values():
                    row[s : s + 1] = [(row[s][0], degree // 2)] * 2
                yield _changed(candidate, rows)


def _merge_stages(candidate: Candidate, estimator: Estimator) -> Iterator[Arrangement]:
    """Merge two neighbouring stages on a node, in all pipelines of a class or in one of them.

    The merged stage stays in place or goes to an end: a wide stage may be best as the last one,
    though neither of the two was.
    """
    for members in _members(candidate, estimator):
        stages = {member: candidate.arrangement[member].stages for member in members}
        for s, degree in enumerate(candidate.arrangement[members[0]].tp_degrees[:-1]):
            alike = [member for member, row in stages.items() if row[s] == row[s + 1]]
            if not alike or 2 * degree not in estimator.tp_degrees:
                continue
            last = len(stages[alike[0]]) - 2
            for number, place in itertools.product(
                dict.fromkeys([len(alike), 1]), dict.fromkeys([s, 0, last])
            ):
                rows = _rows(candidate, alike[:number])
                for row in rows.values():
                    merged = row[s][0], 2 * degree
                    del row[s : s + 2]
                    row.insert(place, merged)
                yield _changed(candidate, rows)


def _split_pipelines(candidate: Candidate, estimator: Estimator) -> Iterator[Arrangement]:
    """Split a pipeline into two of half its degrees, or all pipelines of its class."""
    for members in _members(candidate, estimator):
        first = candidate.arrangement[members[0]]
        if not all(_can_halve(degree, estimator) for degree in first.tp_degrees):
            continue
        for number in dict.fromkeys([len(members), 1]):
            rows = [pipeline.stages for pipeline in candidate.arrangement]
            for member in members[:number]:
                rows[member] = tuple([(node, degree // 2) for node, degree in rows[member]])
            yield _arranged([*rows, *(rows[member] for member in members[:number])])


def _merge_pipelines(candidate: Candidate, estimator: Estimator) -> Iterator[Arrangement]:
    """Merge two pipelines on the same nodes into one of twice the degrees, or all such pairs."""
    for members in _members(candidate, estimator):
        first = candidate.arrangement[members[0]]
        if any(2 * degree not in estimator.tp_degrees for degree in first.tp_degrees):
            continue
        places = _grouped(candidate.arrangement[member].nodes for member in members)
        pairs = [pair for same in places for pair in zip(same[::2], same[1::2], strict=False)]
        for number in dict.fromkeys([len(pairs), 1]) if pairs else ():
            rows = {p: pipeline.stages for p, pipeline in enumerate(candidate.arrangement)}
            for kept, other in pairs[:number]:
                del rows[members[other]]
                kept_stages = rows[members[kept]]
                rows[members[kept]] = tuple([(node, 2 * degree) for node, degree in kept_stages])
            yield _arranged([*rows.values()])


def _can_halve(degree: int, estimator: Estimator) -> bool:
    return degree % 2 == 0 and degree // 2 in estimator.tp_degrees


def _map_anew(candidate: Candidate, estimator: Estimator) -> Iterator[Arrangement]:
    """Place all stages again, so that either gradients or activations stay inside nodes."""
    cluster = estimator.cost.cluster
    nodes, counts = cluster.nodes, [node.count for node in cluster.nodes]
    groups = [
        Group(degrees, tuple([nodes[index].device for index in indices]))
        for degrees, indices in candidate.arrangement
    ]
    for order in MappingOrder:
        mapped = map_groups(groups, cluster, counts, order)
        if mapped is not None:
            yield mapped


def _idle(candidate: Candidate, estimator: Estimator) -> list[int]:
    """Return the idle devices of each node."""
    idle = [node.count for node in estimator.cost.cluster.nodes]
    for node, degree in itertools.chain.from_iterable(p.stages for p in candidate.arrangement):
        idle[node] -= degree
    return idle


def _units(
    idle: Sequence[int], kind: int, degree: int, estimator: Estimator
) -> list[tuple[int, int]]:
    """Return the TP groups that idle devices of one class form, as (node, devices)."""
    return [
        (node, degree)
        for node, count in enumerate(idle)
        if estimator.classes[node] == kind
        for _ in range(count // degree)
    ]


def _members(candidate: Candidate, estimator: Estimator) -> list[list[int]]:
    """Return the indices of pipelines, grouped by class."""
    return _grouped(estimator.keys(candidate.arrangement))


_Stages = list[tuple[int, int]]
"""(node, devices) of every stage of a pipeline."""


def _rows(candidate: Candidate, members: Iterable[int]) -> dict[int, _Stages]:
    """Return copies of some pipelines' stages, to be changed."""
    return {member: list(candidate.arrangement[member].stages) for member in members}


def _changed(candidate: Candidate, rows: Mapping[int, _Stages]) -> Arrangement:
    """Return the arrangement of a candidate with other stages in some pipelines."""
    pipelines = list(candidate.arrangement)
    for member, stages in rows.items():
        pipelines[member] = PipelineNodes.of_stages(stages)
    return tuple(pipelines)


def _arranged(rows: Sequence[Sequence[tuple[int, int]]]) -> Arrangement:
    """Return the arrangement of pipelines given by (node, devices) of every stage."""
    return tuple(map(PipelineNodes.of_stages, rows))


def _alike(candidate: Candidate, estimator: Estimator) -> list[list[int]]:
    """Return the indices of pipelines, grouped by class, layers and micro-batches."""
    keys = estimator.keys(candidate.arrangement)
    return _grouped(zip(keys, candidate.layers, candidate.num_microbatches, strict=True))


def _grouped(kinds: Iterable[Hashable]) -> list[list[int]]:
    """Return the indices of each kind."""
    groups: dict[Hashable, list[int]] = {}
    for index, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(index)
    return list(groups.values())


RESIZES: tuple[Family, ...] = (
    _add_pipelines,
    _drop_pipelines,
    _add_stages,
    _drop_stages,
    _split_stages,
    _merge_stages,
    _split_pipelines,
    _merge_pipelines,
)
"""Moves that add or remove devices, or change TP degrees."""
MOVES: tuple[Family, ...] = (
    _move_layers,
    _move_layers_together,
    _move_microbatches,
    _map_anew,
    _move_units,
    _swap_stages_together,
    _move_stages,
)
"""Moves that keep the number of pipelines and all degrees."""
# The second order swaps stages before it moves layers, so that they are balanced for the new order.
ORDERS = (MOVES, (_swap_stages_together, *MOVES))
"""Orders of moves that are tried from every starting point."""
