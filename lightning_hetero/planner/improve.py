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
from dataclasses import replace
from typing import NamedTuple

from lightning_hetero.planner.columns import Column, Rate
from lightning_hetero.planner.judge import Candidate, Judge
from lightning_hetero.planner.neighbourhood import Neighbourhood, Pipeline
from lightning_hetero.planner.pace import deal
from lightning_hetero.planner.placement import MappingOrder, PlacedStages, share_nodes
from lightning_hetero.planner.stages import Ownership

__all__ = ["Improver"]

_TRIED = 24
"""How many neighbours of a plan, those of the least estimates, are simulated."""
_WORSE, _OF_STAGES = 1.03, 2.0
"""An estimate may be so much above the plan's own; estimates err by 1 to 2 %, and those of a few
stages by this share divided by their number."""
_FAR = 1.10
"""Plans so much slower than the best one are not looked at."""
_MUCH = 0.5
"""Layers are split as if all were recomputed where more than this share of them must be."""
_GAIN = 1e-4
"""Least share of the seconds that a step must gain."""
_KINDS = 12
"""Most kinds of pipelines between which a micro-batch is moved."""
_FEWEST_NEIGHBOURS, _MOST_NEIGHBOURS, _ESTIMATED = 60, 1_500, 12_000
"""Neighbours estimated for a plan, at least and at most, and their pipelines together."""
_MOST_OVERRUN = 16
"""A plan's neighbours may take so many times the work that a whole search should take; only those
of plans of thousands of devices take more."""
_CHEAP = 16
"""Estimating so many pipelines takes as long as simulating a stage."""


class _Timed(NamedTuple):
    """A pipeline with its layers, seconds and needs."""

    stages: PlacedStages
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
        self._known: dict[Ownership, dict[Pipeline, _Timed | None]] = {}

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
                if self._work() - begun > _MOST_OVERRUN * self.most_work:
                    break
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
            Pipeline(stages, size, layers, count)
            for stages, size, layers, count in zip(
                plan.arrangement, plan.sizes, plan.layers, plan.counts, strict=True
            )
        ]
        estimate_s = self._fill(own, plan.counts)
        if estimate_s is None:
            return []
        most_s = estimate_s[1] * (_WORSE + _OF_STAGES / sum(map(len, plan.layers)))
        rated: dict[Candidate, float] = {}
        most = max(_FEWEST_NEIGHBOURS, min(_MOST_NEIGHBOURS, _ESTIMATED // len(own)))
        neighbours = list(itertools.islice(Neighbourhood(self.judge).of(own), most))
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
        likeliest = sorted(rated, key=rated.__getitem__)
        return [item for item in likeliest if item not in seen][:_TRIED]

    def _fill(
        self, pipelines: Sequence[Pipeline], counts: Sequence[int] | None
    ) -> tuple[Candidate, float] | None:
        """Return the candidate of some pipelines and its estimated seconds.

        Holders own; where they then must recompute, owners may follow room instead.
        """
        found = self._filled(pipelines, counts, by_room=False)
        if self._may_follow_room(pipelines):
            other = self._filled(pipelines, counts, by_room=True)
            return min((f for f in (found, other) if f), key=lambda item: item[1], default=None)
        return found

    def _may_follow_room(self, pipelines: Sequence[Pipeline]) -> bool:
        """Return whether a stage lacks memory, or recomputes, if holders own."""
        known = self._known[Ownership(len(pipelines))]
        return self.judge.cost.layout.is_owned_by_room and any(
            (timed := known[p]) is None or timed.is_recomputing for p in pipelines
        )

    def _time_together(self, neighbours: Sequence[Sequence[Pipeline]]) -> None:
        """Time all neighbours' pipelines with one call for each ownership."""
        for number, rows in itertools.groupby(sorted(neighbours, key=len), key=len):
            holders, by_room = Ownership(number), Ownership(number, by_room=True)
            alike = list(rows)
            self._time(itertools.chain.from_iterable(alike), holders)
            following = [row for row in alike if self._may_follow_room(row)]
            self._time(itertools.chain.from_iterable(following), by_room)
            lacking = [row for row in following if self._lacking_room(row, by_room) > 0]
            recomputing = by_room._replace(recomputes_all=True)
            self._time(itertools.chain.from_iterable(lacking), recomputing)

    def _timed(self, pipelines: Sequence[Pipeline], ownership: Ownership) -> list[_Timed] | None:
        """Return pipelines with their seconds; None if one doesn't fit."""
        self._time(pipelines, ownership)
        known = self._known[ownership]
        timed = [item for p in pipelines if (item := known[p]) is not None]
        return timed if len(timed) == len(pipelines) else None

    def _lacking_room(self, pipelines: Sequence[Pipeline], ownership: Ownership) -> float:
        """Return the parameters that no rank has room to own, 0 or less if all have an owner."""
        timed = self._timed(pipelines, ownership)
        if timed is None:
            return 0.0
        needed = self.judge.cost.model.num_params - self.judge.idle_room(
            [stage for pipeline in pipelines for stage in pipeline.stages], len(pipelines)
        )
        return needed - sum(item.rate.room for item in timed)

    def _filled(
        self, pipelines: Sequence[Pipeline], counts: Sequence[int] | None, *, by_room: bool
    ) -> tuple[Candidate, float] | None:
        """Return candidate and seconds for one ownership."""
        ownership, judge = Ownership(len(pipelines), by_room), self.judge
        timed = self._timed(pipelines, ownership)
        if timed is None:
            return None
        sizes, total = [p.size for p in pipelines], judge.workload.global_batch_size
        rates = [item.rate for item in timed]
        if counts is None:
            counts = deal(rates, sizes, total, equally=judge.equally)
        if counts is None:
            return None
        seconds = _last_end_s(timed, counts)
        lacking = self._lacking_room(pipelines, ownership) if by_room else 0.0
        if lacking > 0:
            # Some layers must be recomputed for room: the share of those that can be.
            spare = self._timed(pipelines, ownership._replace(recomputes_all=True))
            more = sum(item.rate.room for item in spare or timed) - sum(r.room for r in rates)
            if spare is None or lacking > more:
                return None
            share = lacking / more
            seconds += share * (_last_end_s(spare, counts) - seconds)
            timed = spare if share > _MUCH else timed
        candidate = Candidate(
            arrangement=tuple([item.stages for item in timed]),
            layers=tuple([item.layers for item in timed]),
            sizes=tuple(sizes),
            counts=tuple(counts),
        )
        return candidate, seconds

    def _time(self, pipelines: Iterable[Pipeline], ownership: Ownership) -> None:
        """Time those of many pipelines that aren't known, all at once."""
        known = self._known.setdefault(ownership, {})
        new = [p for p in dict.fromkeys(pipelines) if p not in known]
        columns: dict[int, dict[Pipeline, Column]] = {}
        for pipeline, layers in zip(new, self._layers(new, ownership), strict=True):
            known[pipeline] = None
            if layers:
                options = self.judge.options(pipeline.stages)
                column = Column(options, layers, pipeline.size, share_nodes(pipeline.stages))
                columns.setdefault(pipeline.size, {})[pipeline] = column
        for size, column_of in columns.items():
            times = self.judge.times(size, ownership, MappingOrder.STAGES_TOGETHER)
            rates = times.rates(list(column_of.values()))
            for (pipeline, column), rate in zip(column_of.items(), rates, strict=True):
                if rate is not None:
                    is_recomputing = times.is_recomputing(column)
                    known[pipeline] = _Timed(pipeline.stages, column.layers, rate, is_recomputing)

    def _layers(
        self, pipelines: Sequence[Pipeline], ownership: Ownership
    ) -> list[tuple[int, ...] | None]:
        """Return the layers of pipelines, chosen for those that have none; None if none fit."""
        found: dict[Pipeline, tuple[int, ...] | None] = {p: p.layers for p in pipelines}
        for size in {p.size for p in pipelines}:
            times = self.judge.times(size, ownership, MappingOrder.STAGES_TOGETHER)
            bare = [p for p in pipelines if p.size == size and p.layers is None]
            wanted = [
                (
                    self.judge.options(p.stages),
                    share_nodes(p.stages),
                    p.count or times.usual,
                )
                for p in bare
            ]
            found.update(zip(bare, times.splits.of(wanted), strict=True))
        return [found[p] for p in pipelines]

    def _dealt(
        self, plan: Candidate, own: Sequence[Pipeline]
    ) -> Iterator[tuple[Sequence[Pipeline], tuple[int, ...]]]:
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


def _last_end_s(timed: Sequence[_Timed], counts: Sequence[int]) -> float:
    return max(item.rate.ends_s(count) for item, count in zip(timed, counts, strict=True))
