"""Find the fastest plans on given nodes: masters, whole mixes, placement and local search.

Masters are solved for numbers of pipelines worth trying: 1, 2, 3, 4, 6 and so on, until larger ones
get worse, and then around the best one. For the other orders of placement, and for ownership by
room, masters are solved only if that makes a difference for the best number.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.planner.columns import Column
from lightning_hetero.planner.improve import Improver
from lightning_hetero.planner.judge import Candidate, Judge, Pipeline
from lightning_hetero.planner.master import Master, Mix
from lightning_hetero.planner.pace import deal
from lightning_hetero.planner.placement import (
    MappingOrder,
    Option,
    place,
    share_nodes,
)
from lightning_hetero.planner.result import PlannedCandidate, ProgressCallback
from lightning_hetero.planner.stages import Ownership, Stages
from lightning_hetero.planner.workload import Objective, PlanningOptions, Workload
from lightning_hetero.simulator import CostModel, Simulation

_NARROWED = 3
"""Largest number of stages that get a lower TP degree so that nodes have room for a mix."""
_MASTERS = 16
"""Largest number of masters near the best one whose mixes are used, for each ownership."""
_MOVED = 8
"""Number of the fastest mixes that are also used with layers moved between stages."""
_PLACED = 24
"""Number of mixes of each ownership, the fastest by their columns' times, that are placed."""
_IMPROVED = 12
"""How many of the fastest placed plans the last local search begins from."""
_WORK = 6_000
"""Budget of the last local search: stages simulated plus plans estimated, about 1 s."""
_SEARCHES, _BEGIN, _LESS = 4, 4, 8
"""The local searches before the last one, each for one number of pipelines: how many there are,
from how many of the fastest placed plans each begins, and what its budget is divided by."""
_SIZES_KEPT = 3
"""Number of sizes of micro-batches, the best ones alone, that may be mixed in one plan."""
_FAR, _FAR_IN_A_ROW = 1.25, 2
"""More pipelines aren't tried after this many numbers in a row whose T was this multiple of the
best."""
_FINE = 0.03
"""Numbers of pipelines closer to the best one than this share are not tried."""
_HALVINGS = 3
"""How often the numbers halfway between the best one and those next to it are tried."""
_SAME_ORDER = 3e-3
"""Least share by which T must differ for masters of another order of placement to be solved."""


@dataclass(frozen=True)
class SearchTask:
    """What is searched for, and with which costs."""

    cost: CostModel
    workload: Workload
    options: PlanningOptions
    tp_degrees: tuple[int, ...]
    progress: ProgressCallback

    def stages(self, size: int, counts: Sequence[int] | None = None) -> Stages:
        """Return the stages for one size of micro-batches, on some devices of each node."""
        workload = replace(self.workload, sequences_per_microbatch=size)
        return Stages(self.cost, workload, self.tp_degrees, counts)


class FastestPlans:
    """A search for the fastest plans on some devices of each node."""

    def __init__(self, task: SearchTask, stages: dict[int, Stages]) -> None:
        self.task, self.stages = task, stages
        is_free = task.options.objective is Objective.THROUGHPUT
        # If the objective is cost, nodes that only own would have to be paid for as well.
        self.judge = Judge(stages, idle_may_own=is_free, equally=task.options.equal_microbatches)
        self.any_stages = next(iter(stages.values()))
        self.solved: dict[tuple[Ownership, MappingOrder], Master] = {}
        self.num_columns = 0
        self.solved_for: list[int] = []
        """Sizes of the masters in `solved`."""

    def least_s(self) -> float:
        """Return the least seconds of fractional pipelines; infinite if no stage fits a node."""
        return self._masters_of(list(self.stages)) if self.any_stages.options else np.inf

    def run(self) -> list[PlannedCandidate]:
        """Return plans that fit, best first."""
        sizes = self._sizes()
        if sizes != self.solved_for:
            self._masters_of(sizes)
        mixes = self._mixes()
        self.num_columns = sum(len(master.pool) for master in self.solved.values())
        candidates = self._placed(mixes)
        ranked = sorted(candidates, key=self.judge.seconds)
        self.task.progress("Improving the best plans", 0.6)
        improved = self._improved(ranked, ranked[:_IMPROVED])
        plans: dict[ParallelPlan, PlannedCandidate] = {}
        every = [*ranked, *improved]
        for item in sorted(dict.fromkeys(every), key=self.judge.seconds):
            found = self.judge.plan(item)
            if found is not None:
                plans.setdefault(found[0], priced(*found, self.judge.cost))
        return list(plans.values())

    def _improved(self, ranked: list[Candidate], begin: list[Candidate]) -> list[Candidate]:
        """Improve the best plans of several numbers of pipelines, then the best of them all."""
        most_work = _WORK if self.task.options.thorough else _WORK // 8
        alike: dict[int, list[Candidate]] = {}
        for item in ranked:
            alike.setdefault(len(item), []).append(item)
        found = []
        for starts in list(alike.values())[:_SEARCHES]:
            found.append(Improver(self.judge, most_work // _LESS).improve(starts[:_BEGIN]))
        best = [item for item in found if item is not None]
        best.sort(key=self.judge.seconds)
        last = Improver(self.judge, most_work).improve([*best, *begin])
        return [*best, *([last] if last else [])]

    def _sizes(self) -> list[int]:
        """Return the sizes of micro-batches whose columns are mixed."""
        if len(self.stages) == 1:
            return list(self.stages)
        alone: dict[int, float] = {}
        for size in self.stages:
            alone[size] = self._masters_of([size])
            worse = [s for s in alone.values() if s > min(alone.values())]
            if len(worse) > 1 and list(alone.values())[-2:] == worse[-2:]:
                break
        return sorted(sorted(alone, key=alone.__getitem__)[:_SIZES_KEPT])

    # -- masters --------------------------------------------------------------------------------

    def _masters_of(self, sizes: Sequence[int]) -> float:
        """Solve masters for numbers of pipelines worth trying; return the least T."""
        self.solved.clear()
        self.solved_for = list(sizes)
        total = self.any_stages.workload.global_batch_size // min(sizes)
        top = min(total, sum(self.any_stages.devices.values()))
        near = MappingOrder.STAGES_TOGETHER
        numbers = _numbers(top)
        times = self._scan(partial(self._solve_for, order=near), numbers)
        best = min(times, key=times.__getitem__)
        for order in (MappingOrder.PIPELINES_TOGETHER, MappingOrder.APART):
            solve = partial(self._solve_for, order=order)
            if not abs(solve(best) / times[best] - 1) < _SAME_ORDER:
                self._scan(solve, numbers)
        if self.judge.cost.layout.is_owned_by_room:
            # Masters use up to so many pipelines, and may use fewer.
            used = sum(number for _, number in self.solved[Ownership(best), near].best_columns())
            least = bisect_left(numbers, max(1, round(used)))
            self._follow_room(times, numbers[max(0, least - 1) :])
        return min(master.time_s for master in self.solved.values())

    def _follow_room(self, times: Mapping[int, float], numbers: Sequence[int]) -> None:
        """Solve masters with owners by room for the best number, and for more than fit otherwise.

        Also for the least of some numbers. If they gain something there, for other numbers, too.
        """

        def solve(number: int) -> float:
            return self._solve(Ownership(number, by_room=True), MappingOrder.STAGES_TOGETHER)

        least_s = min(times.values())
        lacking = [n for n in numbers if times.get(n) == np.inf]
        near = [min(times, key=times.__getitem__), *lacking[:1], numbers[0]]
        if least_s == np.inf or min(map(solve, near)) <= least_s * (1 - _SAME_ORDER):
            rooms = self._scan(solve, numbers)
            best = Ownership(min(rooms, key=rooms.__getitem__), by_room=True)
            self._solve(best, MappingOrder.PIPELINES_TOGETHER)

    def _scan(self, solve: Callable[[int], float], numbers: Sequence[int]) -> dict[int, float]:
        """Try numbers of pipelines in order, until more are worse, and those around the best."""
        known: dict[int, float] = {}
        for number in numbers:
            known[number] = solve(number)
            last = list(known.values())[-_FAR_IN_A_ROW - 1 :]
            if len(last) > _FAR_IN_A_ROW and min(last[1:]) > _FAR * min(known.values()):
                break
        for _ in range(_HALVINGS):
            ordered = sorted(known)
            best = min(known, key=lambda n: (known[n], n))
            place = ordered.index(best)
            new = {(n + best) // 2 for n in ordered[max(0, place - 1) : place + 2]} - known.keys()
            if all(abs(n - best) < _FINE * best for n in new):
                break
            for number in sorted(new):
                known[number] = solve(number)
        return known

    def _solve_for(self, number: int, order: MappingOrder) -> float:
        return self._solve(Ownership(number), order)

    def _solve(self, ownership: Ownership, order: MappingOrder) -> float:
        """Return the least T of a master, solved once, with the best columns of those before."""
        if (ownership, order) not in self.solved:
            masters = [self.judge.times(size, ownership, order) for size in self.solved_for]
            master, before = Master(masters), list(self.solved.items())
            near = [m for (_, other), m in before if other is order or len(before) < 3]
            for other in near[-2:]:
                master.add(other.promising())
            alike = [m.time_s for (o, _), m in before if o.by_room is ownership.by_room]
            self.solved[ownership, order] = master
            master.solve(min(alike, default=np.inf))
        return self.solved[ownership, order].time_s

    def _mixes(self) -> list[tuple[Master, Mix]]:
        """Return the mixes of the masters near the best one of each ownership, fastest first.

        If owners follow room, the fractional T may be far below that of any plan.
        """
        masters = [master for master in self.solved.values() if master.time_s < np.inf]
        masters.sort(key=lambda master: master.time_s)
        found: list[tuple[Master, Mix]] = []
        for by_room in (False, True):
            alike = [m for m in masters if m.by_room is by_room][:_MASTERS]
            near = [m for m in alike if m.time_s <= alike[0].time_s * _FAR]
            for master in near:
                master.add_moved()
            mixes = _distinct([(master, mix) for master in near for mix in master.mixes()])
            found += mixes[:_PLACED]
            found += [(master, master.with_layers_moved(mix)) for master, mix in mixes[:_MOVED]]
        return _distinct(found)

    # -- candidates -----------------------------------------------------------------------------

    def _placed(self, mixes: Sequence[tuple[Master, Mix]]) -> list[Candidate]:
        """Return the mixes on nodes, with micro-batches, in both orders of placement."""
        found: dict[Candidate, None] = {}
        for master, mix in mixes:
            for order in (MappingOrder.STAGES_TOGETHER, MappingOrder.PIPELINES_TOGETHER):
                item = self._candidate(master, mix, order)
                if item is not None:
                    found[item] = None
        return [item for item in found if self.judge.plan(item) is not None]

    def _candidate(self, master: Master, mix: Mix, order: MappingOrder) -> Candidate | None:
        """Return a mix on nodes; if they have no room for it, with narrower stages."""
        columns = [column for column, number in mix.columns for _ in range(number)]
        nodes = self.any_stages.class_of_node, self.any_stages.counts
        arrangement = place([column.options for column in columns], *nodes, order)
        for _ in range(_NARROWED):
            if arrangement is None:
                columns = self._narrowed(master, columns)
                arrangement = place([column.options for column in columns], *nodes, order)
        if arrangement is None:
            return None
        pairs = zip(columns, arrangement, strict=True)
        columns = [column._replace(inside=share_nodes(stages)) for column, stages in pairs]
        rates = [master.times[column.size].rate(column) for column in columns]
        known = [rate for rate in rates if rate is not None]
        sizes = [column.size for column in columns]
        total = self.any_stages.workload.global_batch_size
        dealt = deal(known, sizes, total, equally=self.judge.equally)
        if dealt is None:
            return None
        rows = zip(arrangement, columns, dealt, strict=True)
        return tuple([Pipeline(stages, c.layers, c.size, count) for stages, c, count in rows])

    def _narrowed(self, master: Master, columns: list[Column]) -> list[Column]:
        """Return columns of which a stage has the next lower degree, the one that loses least."""
        found = []
        for column in dict.fromkeys(columns):
            times = master.times[column.size]
            before = times.rate(column)
            assert before is not None, "columns of a mix fit"
            for stage, (kind, degree) in enumerate(column.options):
                lower = max((d for d in self.task.tp_degrees if d < degree), default=degree)
                narrow = Option(kind, lower)
                options = (*column.options[:stage], narrow, *column.options[stage + 1 :])
                layers = times.balance(options)
                item = column._replace(options=options, layers=layers or ())
                rate = times.rate(item) if layers and lower < degree else None
                if rate is not None:
                    found.append((rate.slope_s / before.slope_s, columns.index(column), item))
        if not found:
            return columns
        _, index, item = min(found)
        return [*columns[:index], item, *columns[index + 1 :]]


def _distinct(mixes: list[tuple[Master, Mix]]) -> list[tuple[Master, Mix]]:
    """Return mixes without repeats, fastest first."""
    ordered = sorted(mixes, key=lambda pair: pair[1].time_s, reverse=True)
    kept = {(master.ownership, mix.columns): (master, mix) for master, mix in ordered}
    return sorted(kept.values(), key=lambda pair: pair[1].time_s)


def _numbers(top: int) -> list[int]:
    """Return numbers of pipelines to try: 1, 2, 3, 4, and then half as many more each time."""
    found, number = [], 1
    while number < top:
        found.append(number)
        number = max(number + 1, number * 3 // 2)
    return [*found, top]


def priced(found: ParallelPlan, simulation: Simulation, cost: CostModel) -> PlannedCandidate:
    """Return a simulated plan with the price of the nodes that it uses."""
    owners = [rank for rank, share in enumerate(found.owner_shares or ()) if share]
    used = {cost.node_of_rank[rank] for rank in (*found.ranks, *owners)}
    price = cost.cluster.price_of(sorted(used))
    return PlannedCandidate(plan=found, simulation=simulation, price_per_hour=price)
