"""Find the best plan for a cluster: columns, placed, judged and improved.

1. A master for each number of pipelines worth trying says how often each column runs (`master`).
2. Its whole numbers are placed on nodes in two orders, and simulated (`placement`, `judge`).
3. The best plans, and the one that runs, are improved by local search (`improve`).
4. A lower bound on every plan says how much could be left (`bound`).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.planner.bound import bound_price, bound_time_s
from lightning_hetero.planner.hosts import candidates_on_hosts, cost_on_hosts
from lightning_hetero.planner.improve import Improver
from lightning_hetero.planner.judge import Candidate, Judge, deal
from lightning_hetero.planner.master import Master, Mix
from lightning_hetero.planner.placement import MappingOrder, PipelineNodes, place
from lightning_hetero.planner.result import PlannedCandidate, PlanningResult, ProgressCallback
from lightning_hetero.planner.stages import Ownership, Stages
from lightning_hetero.planner.workload import (
    Objective,
    PlanningOptions,
    Workload,
    explain_no_room,
    valid_tp_degrees,
)
from lightning_hetero.simulator import CostModel, RooflineCost, Simulation

__all__ = ["plan", "plan_best_size"]

_NEAR = 1.06
"""A master may end so much above the best one, and its plans are placed and simulated."""
_PLACED = 24
"""Whole mixes that are placed and simulated, the fastest by their own times."""
_IMPROVED = 12
"""Plans that local search begins from."""
_WORK = 6_000
"""Stages that local search may simulate from each plan: 2 s at most."""
_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Sequences of a micro-batch that are tried; more fill a device's memory and gain nothing."""
_SIZES_KEPT = 3
"""Sizes whose columns are mixed: the best alone, and those next to it."""


def plan(  # noqa: PLR0913 - the public face
    cluster: Cluster,
    model: ModelSpec,
    workload: Workload,
    options: PlanningOptions | None = None,
    *,
    cost: CostModel | None = None,
    progress: ProgressCallback | None = None,
    start: ParallelPlan | None = None,
) -> PlanningResult:
    """Return the best plans that were found, ranked by the simulator.

    The same arguments give the same result.

    Args:
        cluster: The machines.
        model: The model's sizes.
        workload: What an iteration has to do.
        options: How to search.
        cost: What computing costs; the roofline of the cluster's devices if left out.
        progress: Told what is being done.
        start: The plan that runs; no worse plan is returned.

    Raises:
        PlanningError: The model fits nowhere, or an option can't be met.
    """
    cost = cost or RooflineCost(cluster, model)
    sizes = (workload.sequences_per_microbatch,)
    return _search(cost, workload, options or PlanningOptions(), sizes, progress, start)


def plan_best_size(
    cost: CostModel,
    workload: Workload,
    options: PlanningOptions | None = None,
    *,
    progress: ProgressCallback | None = None,
    start: ParallelPlan | None = None,
    sizes: Sequence[int] = _SIZES,
) -> PlanningResult:
    """Return the best result over sizes of micro-batches, which pipelines may have unequal.

    Args:
        cost: Times and bytes on the cluster.
        workload: The iteration to plan for; its size of micro-batches is ignored.
        options: How to search.
        progress: Told what is being done.
        start: The plan that runs; no worse plan is returned.
        sizes: Sequences of a micro-batch to choose from.

    Raises:
        PlanningError: The model doesn't fit with any size.
    """
    batch = workload.global_batch_size
    fitting = tuple(size for size in sizes if batch % size == 0)
    usual = replace(workload, sequences_per_microbatch=fitting[0])
    return _search(cost, usual, options or PlanningOptions(), fitting, progress, start)


def sizes_of(result: PlanningResult) -> str:
    """Return the samples of the best plan's micro-batches, such as "1 and 4"."""
    usual = result.workload.sequences_per_microbatch
    sizes = {pipeline.microbatch_size or usual for pipeline in result.best.plan.pipelines}
    return " and ".join(map(str, sorted(sizes)))


def _search(
    cost: CostModel,
    workload: Workload,
    options: PlanningOptions,
    sizes: Sequence[int],
    progress: ProgressCallback | None,
    start: ParallelPlan | None,
) -> PlanningResult:
    """Search with states on devices, and on hosts where devices have no room for them."""
    if options.objective is Objective.COST and cost.cluster.price_per_hour is None:
        raise PlanningError(
            "Planning for cost needs the price of every node. Give each node a price_per_hour "
            "in the cluster file, or plan for throughput."
        )
    degrees = valid_tp_degrees(cost, workload, options)
    task = _Task(cost, workload, options, degrees, progress or (lambda _what, _share: None))
    found = _Search(task, sizes).run(start)
    relaxed = cost_on_hosts(cost)
    if relaxed is None or (found is not None and found.gap < _HOSTS_GAP):
        if found is None:
            raise PlanningError(explain_no_room(cost, workload, degrees))
        return found
    on_hosts = _Search(replace(task, cost=relaxed), sizes).run(None)
    if on_hosts is None:
        if found is None:
            raise PlanningError(explain_no_room(relaxed, workload, degrees))
        return found
    try:
        kept = replace(on_hosts, candidates=candidates_on_hosts(on_hosts, cost))
    except PlanningError:
        if found is None:
            raise
        return found
    if found is None:
        return kept
    bound_s = min(found.lower_bound_s, kept.lower_bound_s)
    return replace(min(found, kept, key=lambda item: item.score), lower_bound_s=bound_s)


_HOSTS_GAP = 0.1
"""Gap to the bound from which plans with states on hosts are tried, too."""


@dataclass(frozen=True)
class _Task:
    """What is searched for."""

    cost: CostModel
    workload: Workload
    options: PlanningOptions
    tp_degrees: tuple[int, ...]
    progress: ProgressCallback

    def stages(self, size: int, counts: Sequence[int] | None = None) -> Stages:
        """Return the stages for one size of micro-batches, on some devices of each node."""
        workload = replace(self.workload, sequences_per_microbatch=size)
        return Stages(self.cost, workload, self.tp_degrees, counts)


class _Search:
    """One search over sizes of micro-batches and, for cost, over sets of nodes."""

    def __init__(self, task: _Task, sizes: Sequence[int]) -> None:
        self.task, self.sizes = task, tuple(sizes)
        self.is_cost = task.options.objective is Objective.COST
        self.num_columns = 0

    def run(self, start: ParallelPlan | None) -> PlanningResult | None:
        """Return the ranked plans; None if the model fits nowhere."""
        task = self.task
        task.progress("Choosing pipelines", 0.0)
        every = {size: task.stages(size) for size in self.sizes}
        found: dict[ParallelPlan, PlannedCandidate] = {}
        num_simulated = 0
        for counts in self._node_sets(every):
            stages = {size: task.stages(size, counts) for size in self.sizes} if counts else every
            part = _OnNodes(task, stages)
            for item in part.run(start):
                found.setdefault(item.plan, item)
            self.num_columns += part.num_columns
            num_simulated += part.judge.num_simulated
        if start is not None:
            found |= self._running(start, every)
        ranked = sorted(found.values(), key=lambda item: item.score(task.options.objective))
        if not ranked:
            return None
        task.progress("Bounding", 0.95)
        return self._result(ranked, every, num_simulated)

    def _running(
        self, start: ParallelPlan, stages: dict[int, Stages]
    ) -> dict[ParallelPlan, PlannedCandidate]:
        """Return the plan that runs, as it is, if it fits this cluster and iteration."""
        judge = Judge(stages)
        workload, sizes = self.task.workload, self.sizes
        samples = sum(
            (p.num_microbatches or 0) * (p.microbatch_size or workload.sequences_per_microbatch)
            for p in start.pipelines
        )
        is_here = max(start.ranks) < self.task.cost.cluster.num_ranks
        if not is_here or samples != workload.global_batch_size or not sizes:
            return {}
        simulation = judge.simulate(start)
        return (
            {start: _priced(start, simulation, judge.cost)} if simulation.fits else {}
        )

    def _result(
        self, ranked: list[PlannedCandidate], every: dict[int, Stages], num_simulated: int
    ) -> PlanningResult:
        task, best = self.task, ranked[0]
        seconds = min(item.simulation.iteration_time_s for item in ranked)
        price_bounds = [bound_price(stages) for stages in every.values()]
        prices = [price for price in price_bounds if price is not None]
        bounds = [bound_time_s(stages, seconds) for stages in every.values()]
        workload = task.workload
        own = {p.microbatch_size or workload.sequences_per_microbatch for p in best.plan.pipelines}
        if len(own) == 1:
            (size,) = own
            workload = replace(workload, sequences_per_microbatch=size)
        bound_s = min(bounds)
        if len(own) > 1:
            # Pipelines of different sizes together may finish more than those of any one.
            work = [
                stages.workload.global_batch_size / seconds_of
                for stages, seconds_of in zip(every.values(), bounds, strict=True)
            ]
            bound_s = min(bound_s, workload.global_batch_size / sum(work))
        task.progress("Done", 1.0)
        return PlanningResult(
            candidates=tuple(ranked[: task.options.num_candidates]),
            workload=workload,
            lower_bound_s=bound_s,
            lower_bound_price=min(prices, default=None),
            objective=task.options.objective,
            num_estimated=self.num_columns,
            num_simulated=num_simulated,
        )

    def _node_sets(self, every: dict[int, Stages]) -> Iterator[Sequence[int] | None]:
        """Yield devices of each node that may be used: all, and for cost the likeliest sets."""
        if not self.is_cost:
            yield None
            return
        nodes = self.task.cost.cluster.nodes
        any_stages = next(iter(every.values()))
        members: dict[int, list[int]] = {}
        for index, kind in enumerate(any_stages.class_of_node):
            members.setdefault(kind, []).append(index)
        for row in members.values():
            row.sort(key=lambda index: (nodes[index].price_per_hour or 0.0) / nodes[index].count)
        kinds = list(members)
        tried: dict[tuple[int, ...], float] = {}

        def rate(numbers: tuple[int, ...]) -> None:
            if numbers in tried or not any(numbers):
                return
            chosen = {i for k, n in zip(kinds, numbers, strict=True) for i in members[k][:n]}
            counts = [node.count * (i in chosen) for i, node in enumerate(nodes)]
            stages = {size: self.task.stages(size, counts) for size in self.sizes}
            seconds = _OnNodes(self.task, stages).least_s()
            tried[numbers] = seconds * (self.task.cost.cluster.price_of(chosen) or 0.0)

        steps = [
            sorted({0, *(2**i for i in range(12) if 2**i < len(members[k])), len(members[k])})
            for k in kinds
        ]
        full = tuple(len(members[kind]) for kind in kinds)
        rate(full)
        grid = itertools.islice(itertools.product(*steps), 64)
        for numbers in [
            *grid,
            *(tuple(n * (j == i) for j, n in enumerate(full)) for i in range(len(full))),
        ]:
            rate(numbers)
        for _ in range(8):
            best = min(tried, key=tried.__getitem__)
            before = len(tried)
            for i, n in itertools.product(range(len(kinds)), (-1, 1)):
                moved = tuple(v + n * (j == i) for j, v in enumerate(best))
                if 0 <= moved[i] <= full[i]:
                    rate(moved)
            if len(tried) == before:
                break
        for numbers in sorted(tried, key=tried.__getitem__)[:3]:
            chosen = {i for k, n in zip(kinds, numbers, strict=True) for i in members[k][:n]}
            yield [node.count * (i in chosen) for i, node in enumerate(nodes)]


class _OnNodes:
    """A search for the fastest plans on some devices of each node."""

    def __init__(self, task: _Task, stages: dict[int, Stages]) -> None:
        self.task, self.stages = task, stages
        is_free = task.options.objective is Objective.THROUGHPUT
        # Nodes that only own would have to be paid for as well.
        self.judge = Judge(stages, idle_may_own=is_free, equally=task.options.equal_microbatches)
        self.any_stages = next(iter(stages.values()))
        self.solved: dict[tuple[Ownership, MappingOrder], Master] = {}
        self.num_columns = 0

    def least_s(self) -> float:
        """Return the least seconds of fractional pipelines."""
        return self._masters_of(list(self.stages))

    def run(self, start: ParallelPlan | None) -> list[PlannedCandidate]:
        """Return plans that fit, best first."""
        sizes = self._sizes()
        least_s = self._masters_of(sizes)
        mixes = self._mixes(least_s)
        self.num_columns = sum(len(master.pool) for master in self.solved.values())
        candidates = self._placed(mixes)
        running = self._candidate_of(start) if start is not None else None
        ranked = sorted(candidates, key=self.judge.seconds)
        begin = ranked[:_IMPROVED] + ([running] if running is not None else [])
        self.task.progress("Improving the best plans", 0.6)
        most_work = _WORK if self.task.options.thorough else _WORK // 8
        improved = Improver(self.judge, most_work).improve(begin)
        plans: dict[ParallelPlan, PlannedCandidate] = {}
        every = [*ranked, *begin, *([improved] if improved else [])]
        for item in sorted(dict.fromkeys(every), key=self.judge.seconds):
            found = self.judge.plan(item)
            if found is not None:
                plans.setdefault(found[0], _priced(*found, self.judge.cost))
        return list(plans.values())

    def _sizes(self) -> list[int]:
        """Return the sizes of micro-batches whose columns are mixed."""
        if len(self.stages) == 1:
            return list(self.stages)
        alone: dict[int, float] = {}
        for size in self.stages:
            self.solved.clear()
            alone[size] = self._masters_of([size])
            worse = [s for s in alone.values() if s > min(alone.values())]
            if len(worse) > 1 and list(alone.values())[-2:] == worse[-2:]:
                break
        self.solved.clear()
        best = min(alone.values())
        return sorted(sorted(alone, key=alone.__getitem__)[:_SIZES_KEPT]) if best else list(alone)

    # -- masters --------------------------------------------------------------------------------

    def _masters_of(self, sizes: Sequence[int]) -> float:
        """Solve masters for numbers of pipelines worth trying; return the least T."""
        total = self.any_stages.workload.global_batch_size // min(sizes)
        top = min(total, sum(self.any_stages.devices.values()))
        orders = (MappingOrder.STAGES_TOGETHER, MappingOrder.PIPELINES_TOGETHER)
        times: dict[tuple[int, MappingOrder], float] = {}

        def solve(number: int, order: MappingOrder) -> float:
            if (number, order) not in times:
                upper_s = min(times.values(), default=float("inf"))
                times[number, order] = self._solve(Ownership(number), order, sizes, upper_s)
            return times[number, order]

        numbers = _numbers(top)
        numbers = self._scan(lambda n: solve(n, orders[0]), numbers)
        near = sorted((n for n, o in times if o is orders[0]), key=lambda n: times[n, orders[0]])
        best = near[0]
        other = solve(best, orders[1])
        if not abs(other / times[best, orders[0]] - 1) < _SAME_ORDER:
            self._scan(lambda n: solve(n, orders[1]), numbers)
        least_s = min(times.values())
        if not self.judge.cost.layout.is_owned_by_room:
            return least_s
        rooms: dict[int, float] = {}

        def solve_by_room(number: int) -> float:
            if number not in rooms:
                upper_s = min(rooms.values(), default=float("inf"))
                rooms[number] = self._solve(Ownership(number, True), orders[0], sizes, upper_s)
            return rooms[number]

        if least_s < np.inf and solve_by_room(best) > least_s * (1 - _SAME_ORDER):
            return min(least_s, rooms[best])
        self._scan(solve_by_room, _numbers(top))
        best = min(rooms, key=rooms.__getitem__)
        other = self._solve(Ownership(best, True), orders[1], sizes, rooms[best])
        return min(least_s, rooms[best], other)

    def _scan(self, solve: Callable[[int], float], numbers: Sequence[int]) -> list[int]:
        """Try numbers of pipelines in order, until more are worse, and those around the best."""
        known: dict[int, float] = {}
        for number in numbers:
            known[number] = solve(number)
            best = min(known.values())
            worse = [seconds > _FAR * best for seconds in known.values()]
            if len(worse) > _FAR_IN_A_ROW and all(worse[-_FAR_IN_A_ROW:]) and best < np.inf:
                break
        for _ in range(3):
            ordered = sorted(known)
            place = ordered.index(min(known, key=lambda n: (known[n], n)))
            best_number = ordered[place]
            near = ordered[max(0, place - 1) : place + 2]
            new = {(n + best_number) // 2 for n in near} - known.keys()
            if not new or max(abs(n - best_number) for n in new) < _FINE * best_number:
                break
            for number in sorted(new):
                known[number] = solve(number)
        return sorted(known)

    def _solve(
        self, ownership: Ownership, order: MappingOrder, sizes: Sequence[int], upper_s: float
    ) -> float:
        master = Master([self.judge.times(size, ownership, order) for size in sizes])
        near = [m for (o, d), m in self.solved.items() if d is order or len(self.solved) < 3]
        for other in near[-2:]:
            master.add(list(other.pool))
        self.solved[ownership, order] = master
        return master.solve(upper_s)

    def _mixes(self, least_s: float) -> list[tuple[Master, Mix]]:
        """Return whole mixes of the masters near the best one, fastest first."""
        near = sorted(
            (m for m in self.solved.values() if m.time_s <= least_s * _NEAR),
            key=lambda master: master.time_s,
        )
        found = [(master, mix) for master in near[:12] for mix in master.mixes()]
        return sorted(found, key=lambda pair: pair[1].time_s)[:_PLACED]

    # -- candidates -----------------------------------------------------------------------------

    def _placed(self, mixes: Sequence[tuple[Master, Mix]]) -> list[Candidate]:
        """Return the mixes on nodes, with micro-batches, in both orders of placement."""
        found: dict[Candidate, None] = {}
        for master, mix in mixes:
            columns = [column for column, number in mix.columns for _ in range(number)]
            rates = [master.pool[column] for column in columns]
            sizes = [column.size for column in columns]
            total = self.any_stages.workload.global_batch_size
            counts = deal(rates, sizes, total, equally=self.judge.equally)
            if counts is None:
                continue
            for order in MappingOrder:
                arrangement = place(
                    [column.group for column in columns],
                    self.any_stages.class_of_node,
                    self.any_stages.counts,
                    order,
                )
                if arrangement is not None:
                    layers = tuple(column.layers for column in columns)
                    found[
                        Candidate(
                            arrangement=arrangement,
                            layers=layers,
                            sizes=tuple(sizes),
                            counts=tuple(counts),
                        )
                    ] = None
        return [item for item in found if self.judge.plan(item) is not None]

    def _candidate_of(self, start: ParallelPlan) -> Candidate | None:
        """Return the plan that runs as a candidate; None if these nodes can't run it."""
        cost, usual = self.judge.cost, self.task.workload.sequences_per_microbatch
        rows, free = [], list(self.any_stages.counts)
        for pipeline in start.pipelines:
            stages = []
            for stage in pipeline.stages:
                nodes = {cost.node_of_rank[r] for r in stage.ranks if r < len(cost.node_of_rank)}
                if len(nodes) != 1 or max(stage.ranks) >= len(cost.node_of_rank):
                    return None
                (node,) = nodes
                free[node] -= stage.tp_degree
                stages.append((node, stage.tp_degree))
            rows.append(stages)
        sizes = [pipeline.microbatch_size or usual for pipeline in start.pipelines]
        counts = [pipeline.num_microbatches or 0 for pipeline in start.pipelines]
        samples = sum(a * b for a, b in zip(sizes, counts, strict=True))
        if min(free) < 0 or min(counts) < 1 or samples != self.task.workload.global_batch_size:
            return None
        if not set(sizes) <= self.stages.keys() or start.num_layers != self.any_stages.num_layers:
            return None
        candidate = Candidate(
            arrangement=tuple(PipelineNodes.of_stages(row) for row in rows),
            layers=tuple(tuple(len(s.layers) for s in p.stages) for p in start.pipelines),
            sizes=tuple(sizes),
            counts=tuple(counts),
        )
        return candidate if self.judge.plan(candidate) is not None else None


_FAR, _FAR_IN_A_ROW = 1.25, 2
"""More pipelines are not tried where so many numbers in a row were so much above the best one."""
_FINE = 0.03
"""Share by which numbers of pipelines next to each other may differ."""
_SAME_ORDER = 3e-3
"""Share by which the order of placement must matter, for masters of both to be solved."""


def _numbers(top: int) -> list[int]:
    """Return numbers of pipelines to try: 1, 2, 3, 4, and then half as many more each time."""
    found, number = [], 1
    while number < top:
        found.append(number)
        number = max(number + 1, number * 3 // 2)
    return [*found, top]


def _priced(found: ParallelPlan, simulation: Simulation, cost: CostModel) -> PlannedCandidate:
    owners = [rank for rank, share in enumerate(found.owner_shares or ()) if share]
    used = {cost.node_of_rank[rank] for rank in (*found.ranks, *owners)}
    price = cost.cluster.price_of(sorted(used))
    return PlannedCandidate(plan=found, simulation=simulation, price_per_hour=price)
