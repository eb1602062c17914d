"""Improve placed plans by a local search, with the simulator as judge.

The search is best-first: it continues from the fastest plan whose neighbours aren't known yet.
Slopes and fills rank the neighbours (`neighbourhood`), and the simulator judges the most promising.
If a plan has no better neighbour, plans that are nearly as fast are continued from, until the
budget is used up.
"""

import heapq
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightning_hetero.planner.columns import Column, Rate
from lightning_hetero.planner.judge import Candidate, Judge, Pipeline
from lightning_hetero.planner.neighbourhood import Neighbourhood
from lightning_hetero.planner.pace import deal
from lightning_hetero.planner.placement import MappingOrder, share_nodes
from lightning_hetero.planner.splitting import best_layers
from lightning_hetero.planner.stages import Ownership

_TRIED = 24
"""Number of neighbours of a plan, those of the best estimates, that are simulated."""
_WORSE, _OF_STAGES = 1.03, 2.0
"""Factor by which a neighbour's estimate may exceed the plan's own; estimates err by 1 to 2 %. With
few stages they err more: by this share divided by the number of stages."""
_FAR = 1.10
"""Plans that are slower than the best one by this factor aren't continued from."""
_GAIN = 1e-4
"""Least share of the seconds that a step must gain."""
_FEWEST_NEIGHBOURS, _MOST_NEIGHBOURS, _ESTIMATED = 60, 1_500, 12_000
"""Number of neighbours that are estimated for a plan, at least and at most, and of their pipelines
in total."""
_MOST_OVERRUN = 16
"""Factor by which one plan's neighbours may exceed the budget of a whole search; only those of
plans for thousands of devices do."""
_CHEAP = 16
"""Number of pipelines whose estimates take as long as simulating one stage."""


class _Timed(NamedTuple):
    """The layers of a pipeline, and its seconds and needs."""

    layers: tuple[int, ...]
    rate: Rate


class _Estimate(NamedTuple):
    """What is estimated of a plan."""

    end_s: float
    timed: list[_Timed]
    counts: Sequence[int]
    """Micro-batches of each pipeline."""

    def candidate(self, pipelines: Candidate) -> Candidate:
        """Return the plan, with its layers and micro-batches."""
        rows = zip(pipelines, self.timed, self.counts, strict=True)
        return tuple([p._replace(layers=t.layers, num_microbatches=n) for p, t, n in rows])


class Improver:
    """Local search from candidates.

    Args:
        judge: Simulates plans.
        most_work: Budget: the stages that may be simulated plus the neighbours that may be
            estimated.
    """

    def __init__(self, judge: Judge, most_work: int) -> None:
        self.judge, self.most_work = judge, most_work
        self.num_rated = 0
        self._known: dict[Ownership, dict[Pipeline, _Timed | None]] = {}

    def improve(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the fastest plan found from some candidates; None if none of them fits."""
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
                    # Continue from that plan, and come back later for the other neighbours.
                    heapq.heappush(waiting, (seconds, next(serial), plan))
                    best_s, best = found_s, item
                    break
        return best

    def _work(self) -> int:
        return self.judge.work_done + self.num_rated

    def _likeliest(self, plan: Candidate, seen: set[Candidate]) -> list[Candidate]:
        """Return the most promising neighbours of a plan that weren't seen before."""
        self._time_together([plan])
        estimate = self._estimated(plan, keeps_counts=True)
        if estimate is None:
            return []
        most_s = estimate.end_s * (_WORSE + _OF_STAGES / sum(len(p.layers) for p in plan))
        rated: dict[Candidate, float] = {}
        most = max(_FEWEST_NEIGHBOURS, min(_MOST_NEIGHBOURS, _ESTIMATED // len(plan)))
        near = Neighbourhood(self.judge)
        neighbours = list(itertools.islice(near.of(plan), most))
        dealt = [] if self.judge.equally else list(near.dealt(plan))
        self._time_together([*neighbours, *dealt])
        for pipelines in neighbours:
            self.num_rated += 1 + len(plan) // _CHEAP
            found = self._estimated(pipelines, keeps_counts=False)
            if found is not None and found.end_s < most_s:
                rated.setdefault(found.candidate(pipelines), found.end_s)
        for pipelines in dealt:
            found = self._estimated(pipelines, keeps_counts=True)
            if found is not None:
                rated.setdefault(found.candidate(pipelines), min(found.end_s, estimate.end_s))
        likeliest = sorted(rated, key=rated.__getitem__)
        return [item for item in likeliest if item not in seen][:_TRIED]

    def _estimated(self, pipelines: Candidate, *, keeps_counts: bool) -> _Estimate | None:
        """Return the layers, micro-batches and seconds of a candidate; None if it doesn't fit.

        Holders own; if they would have to recompute, owners may follow room instead.
        """
        ownerships = [Ownership(len(pipelines))]
        if self._may_follow_room(pipelines):
            ownerships.append(Ownership(len(pipelines), by_room=True))
        found = []
        for ownership in ownerships:
            known, judge = self._known[ownership], self.judge
            timed = [item for p in pipelines if (item := known[p]) is not None]
            if len(timed) < len(pipelines):
                continue
            rates, sizes = [item.rate for item in timed], [p.size for p in pipelines]
            total = judge.workload.global_batch_size
            counts: Sequence[int] | None = [p.num_microbatches for p in pipelines]
            if not keeps_counts:
                counts = deal(rates, sizes, total, equally=judge.equally)
            if counts is not None:
                pairs = {*zip(rates, counts, strict=True)}
                found.append(_Estimate(max(rate.ends_s(n) for rate, n in pairs), timed, counts))
        return min(found, key=lambda item: item.end_s, default=None)

    def _may_follow_room(self, pipelines: Candidate) -> bool:
        """Return whether a stage lacks memory or recomputes if holders own."""
        known = self._known[Ownership(len(pipelines))]
        return self.judge.cost.layout.is_owned_by_room and any(
            (timed := known[p]) is None or timed.rate.is_recomputing for p in pipelines
        )

    def _time_together(self, every: Sequence[Candidate]) -> None:
        """Time the pipelines of many plans with one call for each ownership."""
        for number, rows in itertools.groupby(sorted(every, key=len), key=len):
            alike = list(rows)
            self._time(itertools.chain.from_iterable(alike), Ownership(number))
            following = filter(self._may_follow_room, alike)
            self._time(itertools.chain.from_iterable(following), Ownership(number, by_room=True))

    def _time(self, pipelines: Iterable[Pipeline], ownership: Ownership) -> None:
        """Time those of many pipelines that aren't known yet, all at once."""
        known = self._known.setdefault(ownership, {})
        by_size: dict[int, list[Pipeline]] = {}
        for pipeline in dict.fromkeys(pipelines):
            if pipeline not in known:
                by_size.setdefault(pipeline.size, []).append(pipeline)
        for size, new in by_size.items():
            times = self.judge.times(size, ownership, MappingOrder.STAGES_TOGETHER)
            columns = {
                p: Column(self.judge.options(p.stages), p.layers, size, share_nodes(p.stages))
                for p in new
            }
            bare = [p for p in new if not p.layers]
            chosen = best_layers(
                times, [(columns[p], p.num_microbatches or times.usual) for p in bare]
            )
            for pipeline, layers in zip(bare, chosen, strict=True):
                columns[pipeline] = columns[pipeline]._replace(layers=layers or ())
            fitting = [column for column in columns.values() if column.layers]
            rates = dict(zip(fitting, times.rates(fitting), strict=True))
            for pipeline, column in columns.items():
                rate = rates.get(column)
                known[pipeline] = None if rate is None else _Timed(column.layers, rate)
