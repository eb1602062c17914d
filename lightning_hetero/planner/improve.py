"""Improve placed plans by local search: one neighbourhood, one driver, the simulator as judge.

A neighbour differs by a layer, a micro-batch or its size, a device, a TP degree, or by two places
swapped. The search is best-first: the fastest plan whose neighbours are not known is looked at
next. Slopes and fills rank its neighbours, the simulator judges the likeliest. So beyond a plan
without a better neighbour, plans nearly as fast are looked at, until as much has been done as may
be.
"""

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_hetero.planner.columns import Column, Rate
from lightning_hetero.planner.judge import Candidate, Judge
from lightning_hetero.planner.pace import deal
from lightning_hetero.planner.placement import MappingOrder, PipelineNodes
from lightning_hetero.planner.stages import Ownership

__all__ = ["Improver"]

_TRIED = 24
"""Neighbours of a plan that are simulated, the likeliest."""
_TRIED_IF_SMALL, _TRIED_STAGES = 120, 1_500
"""Neighbours of small plans that are simulated, with so many stages together."""
_WORSE, _OF_STAGES = 1.03, 2.0
"""An estimate may be so much above the plan's own; estimates err by 1 to 2 %, and those of a few
stages by this share divided by their number."""
_FAR = 1.10
"""Plans so much slower than the best one are not looked at."""
_LACKING = 1.02
"""What more recomputation costs, about, where stages lack room to own all states."""
_GAIN = 1e-4
"""Least share of the seconds that a step must gain."""
_FEW_STAGES = 12
"""Stages of a pipeline up to which one is moved anywhere."""
_KINDS = 12
"""Kinds of pipelines among which micro-batches move."""
_FEWEST_NEIGHBOURS, _MOST_NEIGHBOURS, _ESTIMATED = 60, 1_500, 12_000
"""Neighbours of a plan that are estimated, and their pipelines; a pipeline takes 4 µs."""
_CHEAP = 16
"""Pipelines that are estimated in the time of a simulated stage."""

_Stages = tuple[tuple[int, int], ...]
"""(node, TP degree) of every stage of a pipeline."""


_Pattern = tuple[tuple[int, int], ...]
"""(position of the stage whose node is used, TP degree) of every stage of a changed pipeline."""


def _placed(pattern: _Pattern, stages: _Stages) -> _Stages:
    return tuple([(stages[place][0], degree) for place, degree in pattern])


@dataclass(frozen=True)
class _Pipeline:
    """A pipeline whose layers may have to be chosen again."""

    stages: _Stages
    size: int
    layers: tuple[int, ...] | None = None
    count: int = 0
    """Micro-batches for which layers are chosen; 0 for the average of all pipelines."""


class _Timed(NamedTuple):
    """A pipeline with its layers, seconds and needs."""

    nodes: PipelineNodes
    layers: tuple[int, ...]
    rate: Rate
    is_recomputing: bool


class Improver:
    """Local search from candidates.

    Args:
        judge: Simulates plans.
        most_work: Stages that may be simulated and neighbours that may be estimated, together.
    """

    def __init__(self, judge: Judge, most_work: int) -> None:
        self.judge, self.most_work = judge, most_work
        self.num_rated = 0
        self._known: dict[Ownership, dict[_Pipeline, _Timed | None]] = {}

    def improve(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the fastest plan found from some; None if none of them fits."""
        serial = itertools.count()
        waiting = [(self.judge.seconds(item), next(serial), item) for item in candidates]
        waiting = [entry for entry in waiting if entry[0] < float("inf")]
        heapq.heapify(waiting)
        if not waiting:
            return None
        seen, begun = set(candidates), self._work()
        best_s, _, best = waiting[0]
        while waiting and self._work() - begun < self.most_work:
            seconds, _, plan = heapq.heappop(waiting)
            if seconds > best_s * _FAR:
                break
            for item in self._likeliest(plan, seen):
                seen.add(item)
                found_s = self.judge.seconds(item)
                if found_s < best_s * _FAR:
                    heapq.heappush(waiting, (found_s, next(serial), item))
                if found_s < best_s * (1 - _GAIN):
                    # Go on from there, and come back for the other neighbours later.
                    heapq.heappush(waiting, (seconds, next(serial), plan))
                    best_s, best = found_s, item
                    break
        return best

    def _work(self) -> int:
        return self.judge.work_done + self.num_rated

    def _likeliest(self, plan: Candidate, seen: set[Candidate]) -> list[Candidate]:
        """Return the neighbours of a plan that may be the fastest, those not seen."""
        own = [
            _Pipeline(nodes.stages, size, layers, count)
            for nodes, size, layers, count in zip(
                plan.arrangement, plan.sizes, plan.layers, plan.counts, strict=True
            )
        ]
        estimate_s = self._fill(own, plan.counts)
        if estimate_s is None:
            return []
        num_stages = sum(map(len, plan.layers))
        most_s = estimate_s[1] * (_WORSE + _OF_STAGES / num_stages)
        rated: dict[Candidate, float] = {}
        most = max(_FEWEST_NEIGHBOURS, min(_MOST_NEIGHBOURS, _ESTIMATED // len(own)))
        neighbours = list(itertools.islice(self._neighbours(own), most))
        self._time_together(neighbours)
        for pipelines in neighbours:
            filled = self._fill(pipelines, None)
            self.num_rated += 1 + len(own) // _CHEAP
            if filled is not None and filled[1] < most_s:
                rated.setdefault(filled[0], filled[1])
        for dealt, counts in self._dealt(plan, own):
            filled = self._fill(dealt, counts)
            if filled is not None:
                rated.setdefault(filled[0], min(filled[1], estimate_s[1]))
        tried = max(_TRIED, min(_TRIED_IF_SMALL, _TRIED_STAGES // num_stages))
        likeliest = sorted(rated, key=rated.__getitem__)
        return [item for item in likeliest if item not in seen][:tried]

    def _fill(
        self, pipelines: Sequence[_Pipeline], counts: Sequence[int] | None
    ) -> tuple[Candidate, float] | None:
        """Return the candidate of some pipelines and its estimated seconds.

        Holders own; where they then must recompute, owners may follow room instead.
        """
        found = self._filled(pipelines, counts, by_room=False)
        if self._may_follow_room(pipelines):
            other = self._filled(pipelines, counts, by_room=True)
            return min((f for f in (found, other) if f), key=lambda item: item[1], default=None)
        return found

    def _may_follow_room(self, pipelines: Sequence[_Pipeline]) -> bool:
        """Return whether a stage lacks memory, or recomputes, if holders own."""
        known = self._known[Ownership(len(pipelines))]
        return self.judge.cost.layout.is_owned_by_room and any(
            (timed := known[p]) is None or timed.is_recomputing for p in pipelines
        )

    def _time_together(self, neighbours: Sequence[Sequence[_Pipeline]]) -> None:
        """Time all neighbours' pipelines with one call for each ownership."""
        for number, rows in itertools.groupby(sorted(neighbours, key=len), key=len):
            alike = list(rows)
            self._time(itertools.chain.from_iterable(alike), Ownership(number))
            lacking = [row for row in alike if self._may_follow_room(row)]
            self._time(itertools.chain.from_iterable(lacking), Ownership(number, True))

    def _filled(
        self, pipelines: Sequence[_Pipeline], counts: Sequence[int] | None, *, by_room: bool
    ) -> tuple[Candidate, float] | None:
        """Return candidate and seconds for one ownership."""
        ownership, judge = Ownership(len(pipelines), by_room), self.judge
        self._time(pipelines, ownership)
        known = self._known[ownership]
        timed = [item for p in pipelines if (item := known[p]) is not None]
        if len(timed) < len(pipelines):
            return None
        sizes, total = [p.size for p in pipelines], judge.workload.global_batch_size
        rates = [item.rate for item in timed]
        if counts is None:
            counts = deal(rates, sizes, total, equally=judge.equally)
        if counts is None:
            return None
        candidate = Candidate(
            arrangement=tuple([item.nodes for item in timed]),
            layers=tuple([item.layers for item in timed]),
            sizes=tuple(sizes),
            counts=tuple(counts),
        )
        seconds = max(r.ends_s(k) for r, k in zip(rates, counts, strict=True))
        if by_room and sum(rate.room for rate in rates) < judge.cost.model.num_params:
            seconds *= _LACKING
        return candidate, seconds

    def _time(self, pipelines: Iterable[_Pipeline], ownership: Ownership) -> None:
        """Time those of many pipelines that aren't known, all at once."""
        known = self._known.setdefault(ownership, {})
        new = [p for p in dict.fromkeys(pipelines) if p not in known]
        columns: dict[int, dict[_Pipeline, Column]] = {}
        for pipeline, layers in zip(new, self._layers(new, ownership), strict=True):
            known[pipeline] = None
            if layers:
                options = self.judge.options(pipeline.stages)
                inside = PipelineNodes.of_stages(pipeline.stages).inside
                column = Column(options, layers, pipeline.size, inside)
                columns.setdefault(pipeline.size, {})[pipeline] = column
        for size, column_of in columns.items():
            times = self.judge.times(size, ownership, MappingOrder.STAGES_TOGETHER)
            rates = times.rates(list(column_of.values()))
            for (pipeline, column), rate in zip(column_of.items(), rates, strict=True):
                if rate is not None:
                    nodes = PipelineNodes.of_stages(pipeline.stages)
                    is_recomputing = times.is_recomputing(column)
                    known[pipeline] = _Timed(nodes, column.layers, rate, is_recomputing)

    def _layers(
        self, pipelines: Sequence[_Pipeline], ownership: Ownership
    ) -> list[tuple[int, ...] | None]:
        """Return the layers of pipelines, chosen for those that have none; None if none fit."""
        found: dict[_Pipeline, tuple[int, ...] | None] = {p: p.layers for p in pipelines}
        for size in {p.size for p in pipelines}:
            times = self.judge.times(size, ownership, MappingOrder.STAGES_TOGETHER)
            bare = [p for p in pipelines if p.size == size and p.layers is None]
            wanted = [
                (
                    self.judge.options(p.stages),
                    PipelineNodes.of_stages(p.stages).inside,
                    p.count or times.usual,
                )
                for p in bare
            ]
            found.update(zip(bare, times.splits.of(wanted), strict=True))
        return [found[p] for p in pipelines]

    def _dealt(
        self, plan: Candidate, own: Sequence[_Pipeline]
    ) -> Iterator[tuple[Sequence[_Pipeline], tuple[int, ...]]]:
        """Yield other micro-batches: one from any pipeline to any other of another kind.

        Layers stay, or are chosen again for the new numbers.
        """
        if self.judge.equally:
            return
        kinds: dict[object, int] = {}
        rows = zip(plan.arrangement, plan.layers, plan.sizes, plan.counts, strict=True)
        for index, row in enumerate(rows):
            kinds.setdefault(row, index)
        for giver, taker in itertools.permutations(list(kinds.values())[:_KINDS], 2):
            if plan.counts[giver] > 1 and plan.sizes[giver] == plan.sizes[taker]:
                counts = list(plan.counts)
                counts[giver] -= 1
                counts[taker] += 1
                yield own, tuple(counts)
                split = list(own)
                for index in (giver, taker):
                    split[index] = replace(own[index], layers=None, count=counts[index])
                yield split, tuple(counts)

    # -- the neighbourhood ----------------------------------------------------------------------

    def _neighbours(self, own: list[_Pipeline]) -> Iterator[list[_Pipeline]]:
        first_of: dict[_Pipeline, int] = {}
        for index, pipeline in enumerate(own):
            first_of.setdefault(pipeline, index)
        firsts = list(first_of.values())
        free = list(self.judge.any_stages.counts)
        for pipeline in own:
            for node, degree in pipeline.stages:
                free[node] -= degree
        yield from self._layers_moved(own, firsts)
        for index in firsts:
            kind = self._kind(own[index])
            like = [i for i, pipeline in enumerate(own) if self._kind(pipeline) == kind]
            for pattern in self._patterns(own[index].stages):
                for chosen in (like, [index]) if len(like) > 1 else (like,):
                    yield self._with(own, {i: _placed(pattern, own[i].stages) for i in chosen})
            for stages in self._grown(own[index].stages, free):
                yield self._with(own, {index: stages})
        yield from self._resized(own, firsts)
        yield from self._between(own, firsts)
        for node in self._distinct_nodes(free):
            for degree in self._degrees(node, free[node]):
                yield [*own, replace(own[firsts[0]], stages=((node, degree),), layers=None)]

    def _resized(self, own: list[_Pipeline], firsts: Sequence[int]) -> Iterator[list[_Pipeline]]:
        """Yield plans in which a pipeline's micro-batches hold other numbers of samples."""
        for index, size in itertools.product(firsts, self.judge.stages):
            if size != own[index].size:
                count = max(1, own[index].count * own[index].size // size)
                other = replace(own[index], size=size, layers=None, count=count)
                yield [*own[:index], other, *own[index + 1 :]]

    def _with(self, own: list[_Pipeline], changed: dict[int, _Stages]) -> list[_Pipeline]:
        """Return pipelines with other stages; those without any are left out."""
        return [
            replace(pipeline, stages=changed[index], layers=None) if index in changed else pipeline
            for index, pipeline in enumerate(own)
            if index not in changed or changed[index]
        ]

    def _layers_moved(
        self, own: list[_Pipeline], firsts: Sequence[int]
    ) -> Iterator[list[_Pipeline]]:
        """Yield plans with a layer moved, in one pipeline or in all that are like it."""
        for index in firsts:
            layers = own[index].layers or ()
            for giver, taker in itertools.permutations(range(len(layers)), 2):
                if layers[giver] > 1 and (len(layers) <= 8 or abs(giver - taker) == 1):
                    moved = list(layers)
                    moved[giver] -= 1
                    moved[taker] += 1
                    kind, new = self._shape(own[index]), tuple(moved)
                    like = [i for i, p in enumerate(own) if self._shape(p) == kind]
                    for chosen in (like, [index]) if len(like) > 1 else (like,):
                        yield [
                            replace(p, layers=new) if i in chosen else p for i, p in enumerate(own)
                        ]

    def _shape(self, pipeline: _Pipeline) -> object:
        return self._kind(pipeline), pipeline.layers

    def _kind(self, pipeline: _Pipeline) -> object:
        """Return what pipelines have in common that differ in their nodes and layers only."""
        kinds = self.judge.any_stages.class_of_node
        same = [a[0] == b[0] for a, b in itertools.pairwise(pipeline.stages)]
        degrees = [(kinds[node], degree) for node, degree in pipeline.stages]
        return degrees, same, pipeline.size

    def _distinct_nodes(self, free: Sequence[int]) -> list[int]:
        """Return nodes with free devices, one of each class and number of them."""
        kinds = self.judge.any_stages.class_of_node
        found: dict[tuple[int, int], int] = {}
        for node, count in enumerate(free):
            if count:
                found.setdefault((kinds[node], count), node)
        return list(found.values())

    def _degrees(self, node: int, most: int) -> list[int]:
        stages = self.judge.any_stages
        kind = stages.class_of_node[node]
        return [o.tp_degree for o in stages.options if o.node_class == kind and o.tp_degree <= most]

    def _patterns(self, stages: _Stages) -> Iterator[_Pattern]:
        """Yield changes on a pipeline's own devices.

        A stage is left out, narrower, halved or joined to the next one, or the order is another.
        """
        own = tuple((place, degree) for place, (_, degree) in enumerate(stages))
        for place, (node, degree) in enumerate(stages):
            before, after = own[:place], own[place + 1 :]
            if len(stages) > 1:
                yield before + after
            for other in self._degrees(node, degree - 1):
                yield (*before, (place, other), *after)
                if other * 2 == degree:
                    yield (*before, (place, other), (place, other), *after)
        for place, ((node, degree), (near, next_degree)) in enumerate(itertools.pairwise(stages)):
            joined = degree + next_degree
            if node == near and joined in self._degrees(node, joined):
                yield (*own[:place], (place, joined), *own[place + 2 :])
        yield from self._reordered(stages, own)

    @staticmethod
    def _reordered(stages: _Stages, own: _Pattern) -> Iterator[_Pattern]:
        """Yield a pipeline with two stages swapped, or one moved."""
        for one, other in itertools.combinations(range(len(stages)), 2):
            if stages[one] != stages[other] and (len(stages) <= 8 or other == one + 1):
                swapped = list(own)
                swapped[one], swapped[other] = swapped[other], swapped[one]
                yield tuple(swapped)
        if len(stages) <= _FEW_STAGES:
            for place, other in itertools.permutations(range(len(stages)), 2):
                if abs(other - place) > 1 and stages[other] != stages[place]:
                    rest = own[:place] + own[place + 1 :]
                    yield (*rest[:other], own[place], *rest[other:])

    def _grown(self, stages: _Stages, free: Sequence[int]) -> Iterator[_Stages]:
        """Yield one pipeline's stages with free devices: one is wider, or there is one more."""
        for place, (node, degree) in enumerate(stages):
            for other in self._degrees(node, degree + free[node]):
                if other > degree:
                    yield (*stages[:place], (node, other), *stages[place + 1 :])
        for node in self._distinct_nodes(free):
            for degree in self._degrees(node, free[node]):
                for place in range(len(stages) + 1):
                    yield (*stages[:place], (node, degree), *stages[place:])

    def _between(self, own: list[_Pipeline], firsts: Sequence[int]) -> Iterator[list[_Pipeline]]:
        """Yield plans with stages of two pipelines moved or swapped, or both joined."""
        for one, other in itertools.permutations(firsts, 2):
            if own[one].size != own[other].size:
                continue
            a, b = own[one].stages, own[other].stages
            if one < other:
                yield self._with(own, {one: a + b, other: ()})
                for i, j in itertools.product(range(len(a)), range(len(b))):
                    if a[i] != b[j]:
                        yield self._with(
                            own,
                            {
                                one: (*a[:i], b[j], *a[i + 1 :]),
                                other: (*b[:j], a[i], *b[j + 1 :]),
                            },
                        )
            for i in range(len(a)):
                for place in sorted({0, len(b) // 2, len(b)}):
                    rest = (*b[:place], a[i], *b[place:])
                    yield self._with(own, {one: a[:i] + a[i + 1 :], other: rest})
        for index in firsts:
            stages = own[index].stages
            for place in range(1, len(stages)):
                halves = [
                    replace(own[index], stages=part, layers=None)
                    for part in (stages[:place], stages[place:])
                ]
                yield [*own[:index], *halves, *own[index + 1 :]]
