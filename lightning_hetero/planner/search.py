"""Find the best plan for a cluster: columns, placed, judged and improved.

1. A master for each number of pipelines worth trying says how often each column runs (`master`).
2. Its mixes of whole numbers are placed on nodes in two orders, and simulated (`placement`,
   `judge`).
3. The best plans, and the one that is running, are improved by local search (`improve`).
4. A lower bound on every plan says how much better a plan could be at most (`bound`).
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.planner.bound import bound_price, bound_time_s, work_bound
from lightning_hetero.planner.fastest import FastestPlans, SearchTask, priced
from lightning_hetero.planner.hosts import candidates_on_hosts, cost_on_hosts
from lightning_hetero.planner.judge import Judge
from lightning_hetero.planner.result import PlannedCandidate, PlanningResult, ProgressCallback
from lightning_hetero.planner.stages import Stages
from lightning_hetero.planner.workload import (
    Objective,
    PlanningOptions,
    Workload,
    explain_no_room,
    valid_tp_degrees,
)
from lightning_hetero.simulator import CostModel, RooflineCost

__all__ = ["plan", "plan_best_size", "sizes_of"]

_GRID = 64
"""Largest number of node sets that the grid tries: enough for three classes of up to 8 nodes."""
_KEPT = 3
"""Number of node sets, those of the best scores, for which plans are made."""
_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of sequences of a micro-batch to choose from; larger ones only fill memory."""


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
        workload: The work of an iteration.
        options: How to search.
        cost: The costs of computing; if left out, from the data sheets of the cluster's devices.
        progress: Called with what is being done, and how much of it is done.
        start: The plan that is running; no worse plan is returned.

    Raises:
        PlanningError: The model doesn't fit under any plan, or an option can't be met.
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
    """Return the best result over sizes of micro-batches, which may differ between pipelines.

    Args:
        cost: Times and bytes on the cluster.
        workload: The iteration to plan for; its size of micro-batches is ignored.
        options: How to search.
        progress: Called with what is being done, and how much of it is done.
        start: The plan that is running; no worse plan is returned.
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
    """Search with states on devices, and on hosts if devices have no room for them."""
    if options.objective is Objective.COST and cost.cluster.price_per_hour is None:
        raise PlanningError(
            "Planning for cost needs the price of every node. Give each node a price_per_hour "
            "in the cluster file, or plan for throughput."
        )
    degrees = valid_tp_degrees(cost, workload, options)
    task = SearchTask(cost, workload, options, degrees, progress or (lambda _what, _share: None))
    found = _Search(task, sizes).run(start)
    relaxed = cost_on_hosts(cost)
    if relaxed is None or (found is not None and found.gap < _HOSTS_GAP):
        if found is None:
            raise PlanningError(explain_no_room(cost, workload, degrees))
        return found
    # The fastest plans may need more memory of a host than it has, so all of them are kept.
    every = replace(options, num_candidates=_ON_HOSTS)
    on_hosts = _Search(replace(task, cost=relaxed, options=every), sizes).run(None)
    try:
        if on_hosts is None:
            raise PlanningError(explain_no_room(relaxed, workload, degrees))
        candidates = candidates_on_hosts(on_hosts, cost)
    except PlanningError:
        if found is None:
            raise
        return found
    kept = replace(on_hosts, candidates=candidates[: options.num_candidates])
    if found is None:
        return kept
    bound_s = min(found.lower_bound_s, kept.lower_bound_s)
    return replace(min(found, kept, key=lambda item: item.score), lower_bound_s=bound_s)


_ON_HOSTS = 1_000
"""Largest number of plans with states on hosts; those whose hosts lack memory are dropped later."""
_HOSTS_GAP = 0.1
"""Plans with states on hosts are searched only if the others are above the bound by this share."""


class _Search:
    """One search over sizes of micro-batches and, for cost, over sets of nodes."""

    def __init__(self, task: SearchTask, sizes: Sequence[int]) -> None:
        self.task, self.sizes = task, tuple(sizes)
        self.is_cost = task.options.objective is Objective.COST
        self.num_columns = 0
        self._parts: dict[tuple[int, ...], FastestPlans] = {}

    def run(self, start: ParallelPlan | None) -> PlanningResult | None:
        """Return the ranked plans; None if the model fits nowhere."""
        task = self.task
        task.progress("Choosing pipelines", 0.0)
        every = {size: task.stages(size) for size in self.sizes}
        found: dict[ParallelPlan, PlannedCandidate] = {}
        num_simulated = 0
        scores: list[float] = []
        for counts, least_score in self._node_sets(every):
            # None of its plans would be among those that are returned.
            if sum(score < least_score for score in scores) >= task.options.num_candidates:
                continue
            part = self._on(counts) if counts else FastestPlans(task, every)
            for item in part.run(start):
                found.setdefault(item.plan, item)
                scores.append(item.score(task.options.objective))
            self.num_columns += part.num_columns
            num_simulated += part.judge.num_simulated
        if start is not None:
            found |= self._running(start, every)
        ranked = sorted(
            found.values(),
            key=lambda item: (
                item.score(task.options.objective),
                item.simulation.iteration_time_s,
            ),
        )
        if not ranked:
            return None
        task.progress("Bounding", 0.95)
        return self._result(ranked, every, num_simulated)

    def _running(
        self, start: ParallelPlan, stages: dict[int, Stages]
    ) -> dict[ParallelPlan, PlannedCandidate]:
        """Return the plan that is running, as it is, if it fits this cluster and iteration."""
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
        return {start: priced(start, simulation, judge.cost)} if simulation.fits else {}

    def _result(
        self, ranked: list[PlannedCandidate], every: dict[int, Stages], num_simulated: int
    ) -> PlanningResult:
        task, best = self.task, ranked[0]
        seconds = min(item.simulation.iteration_time_s for item in ranked)
        price_bounds = [bound_price(stages) for stages in every.values()]
        prices = [price for price in price_bounds if price is not None]
        workload = task.workload
        own = {p.microbatch_size or workload.sequences_per_microbatch for p in best.plan.pipelines}
        if len(own) == 1:
            (size,) = own
            workload = replace(workload, sequences_per_microbatch=size)
        task.progress("Done", 1.0)
        return PlanningResult(
            candidates=tuple(ranked[: task.options.num_candidates]),
            workload=workload,
            lower_bound_s=bound_time_s(list(every.values()), seconds),
            lower_bound_price=min(prices, default=None),
            objective=task.options.objective,
            num_estimated=self.num_columns,
            num_simulated=num_simulated,
        )

    def _on(self, counts: Sequence[int]) -> FastestPlans:
        """Return the search on some devices of each node, made once."""
        key = tuple(counts)
        if key not in self._parts:
            stages = {size: self.task.stages(size, counts) for size in self.sizes}
            self._parts[key] = FastestPlans(self.task, stages)
        return self._parts[key]

    def _node_sets(self, every: dict[int, Stages]) -> Sequence[tuple[Sequence[int] | None, float]]:
        """Return the devices of each node that may be used, and the least score of plans on them.

        These are all devices; or, if the objective is cost, the most promising sets.
        """
        if not self.is_cost:
            return [(None, 0.0)]
        sets = _NodeSets(self.task.cost.cluster, every[self.sizes[0]].class_of_node)
        work_s = work_bound(list(every.values()))
        return sets.likeliest(lambda counts: self._on(counts).least_s(), work_s)


_Numbers = tuple[int, ...]
"""Nodes of each class."""
_Seconds = Callable[[Sequence[int]], float]
"""Seconds of an iteration with so many devices of each node."""


class _NodeSets:
    """Sets of nodes that a plan for cost may use.

    Nodes of a class differ only in their price, so a set is a number of nodes of each class: the
    cheapest ones.
    """

    def __init__(self, cluster: Cluster, class_of_node: Sequence[int]) -> None:
        self.cluster = cluster
        by_price = sorted(range(len(cluster.nodes)), key=self._device_price)
        kinds = dict.fromkeys(class_of_node)
        self.members = [[i for i in by_price if class_of_node[i] == kind] for kind in kinds]
        self.full = tuple(map(len, self.members))

    def _device_price(self, index: int) -> float:
        node = self.cluster.nodes[index]
        return (node.price_per_hour or 0.0) / node.count

    def _nodes(self, numbers: _Numbers) -> set[int]:
        return {i for row, n in zip(self.members, numbers, strict=True) for i in row[:n]}

    def counts(self, numbers: _Numbers) -> list[int]:
        """Return the devices of each node."""
        chosen = self._nodes(numbers)
        return [node.count * (index in chosen) for index, node in enumerate(self.cluster.nodes)]

    def price(self, numbers: _Numbers) -> float:
        """Return the price of all nodes of a set."""
        return self.cluster.price_of(self._nodes(numbers)) or 0.0

    def likeliest(self, least_s: _Seconds, work_s: _Seconds) -> list[tuple[list[int], float]]:
        """Return the devices of each node of the best sets, and the least score of plans on them.

        The score is the least seconds of the master times the price. Sets are tried on a grid of
        powers of two, then with one node more or less than the best. A set is skipped if its work
        alone costs more than the best sets.

        Args:
            least_s: Returns the master's seconds.
            work_s: Returns a lower bound of the seconds of the work.
        """
        scores: dict[_Numbers, tuple[float, float]] = {}

        def least(numbers: _Numbers) -> float:
            return self.price(numbers) * work_s(self.counts(numbers))

        def rate(numbers: _Numbers) -> None:
            kept = sorted(scores.values())[:_KEPT]
            scores[numbers] = np.inf, np.inf
            if len(kept) < _KEPT or least(numbers) <= kept[-1][0]:
                seconds = least_s(self.counts(numbers))
                if seconds < np.inf:
                    scores[numbers] = seconds * self.price(numbers), seconds

        for numbers in sorted(self._grid(), key=lambda numbers: (least(numbers), numbers)):
            rate(numbers)
        while new := self._near(min(scores, key=scores.__getitem__)) - scores.keys():
            for numbers in sorted(new):
                rate(numbers)
        ranked = sorted((score, numbers) for numbers, score in scores.items())[:_KEPT]
        fitting = [numbers for score, numbers in ranked if score[0] < np.inf] or [self.full]
        return [(self.counts(numbers), least(numbers)) for numbers in fitting]

    def _near(self, best: _Numbers) -> set[_Numbers]:
        """Return the sets of one node more or less."""
        found = set()
        for index, step in itertools.product(range(len(best)), (-1, 1)):
            moved = (*best[:index], best[index] + step, *best[index + 1 :])
            if any(moved) and 0 <= moved[index] <= self.full[index]:
                found.add(moved)
        return found

    def _grid(self) -> set[_Numbers]:
        """Return all nodes, all nodes of one class alone, and powers of two of each class."""
        kinds = range(len(self.full))
        alone = {tuple(n * (i == only) for i, n in enumerate(self.full)) for only in kinds}
        steps = [
            sorted({0, *(2**i for i in range(most.bit_length()) if 2**i < most), most})
            for most in self.full
        ]
        powers = itertools.islice(itertools.product(*steps), _GRID)
        return {self.full, *alone, *filter(any, powers)}
