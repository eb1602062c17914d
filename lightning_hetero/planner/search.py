"""Find the best plan for a cluster: columns, placed, judged and improved.

1. A master for each number of pipelines worth trying says how often each column runs (`master`).
2. Its mixes of whole numbers are placed on nodes in two orders, and simulated (`placement`,
   `judge`).
3. The best plans are improved by local search (`improve`). The one that is running is judged, too.
4. A lower bound on every plan says how much better a plan could be at most (`bound`).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.planner.bound import bound_price, bound_time_s
from lightning_hetero.planner.fastest import FastestPlans, SearchTask, priced
from lightning_hetero.planner.hosts import candidates_on_hosts, cost_on_hosts
from lightning_hetero.planner.judge import Judge
from lightning_hetero.planner.result import PlannedCandidate, PlanningResult, ProgressCallback
from lightning_hetero.planner.workload import (
    Objective,
    PlanningOptions,
    Workload,
    explain_no_room,
    valid_tp_degrees,
)
from lightning_hetero.simulator import CostModel, RooflineCost

_KEPT = 3
"""Number of sets of nodes for which plans are made: those of the best scores."""
_HOSTS_GAP = 0.1
"""Plans with states on hosts are searched only if the best other plan is above the bound by more
than this share."""
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
    results = [] if found is None else [found]
    relaxed = cost_on_hosts(cost)
    if relaxed is not None and (found is None or found.gap >= _HOSTS_GAP):
        on_hosts = _Search(replace(task, cost=relaxed), sizes).run(None)
        try:
            if on_hosts is not None:
                candidates = candidates_on_hosts(on_hosts, cost)
                results.append(replace(on_hosts, candidates=candidates))
        except PlanningError:
            if not results:
                raise
    if not results:
        raise PlanningError(explain_no_room(relaxed or cost, workload, degrees))
    best = min(results, key=lambda item: item.score)
    return replace(
        best,
        candidates=best.candidates[: options.num_candidates],
        lower_bound_s=min(item.lower_bound_s for item in results),
    )


class _Search:
    """One search over sizes of micro-batches and, for cost, over sets of nodes."""

    def __init__(self, task: SearchTask, sizes: Sequence[int]) -> None:
        self.task, self.sizes = task, tuple(sizes)
        self.every = {size: task.stages(size) for size in sizes}

    def run(self, start: ParallelPlan | None) -> PlanningResult | None:
        """Return all plans, ranked; None if the model fits nowhere."""
        task = self.task
        task.progress("Choosing pipelines", 0.0)
        parts = [FastestPlans(task, self.every)]
        if task.options.objective is Objective.COST:
            parts = self._on_likely_nodes()
        found: dict[ParallelPlan, PlannedCandidate] = {}
        for part in parts:
            found = {item.plan: item for item in part.run()} | found
        if start is not None:
            found |= self._running(start)
        if not found:
            return None
        task.progress("Bounding", 0.95)
        every, objective = list(self.every.values()), task.options.objective
        ranked = sorted(
            found.values(),
            key=lambda item: (item.score(objective), item.simulation.iteration_time_s),
        )
        prices = [price for stages in every if (price := bound_price(stages)) is not None]
        workload, usual = task.workload, task.workload.sequences_per_microbatch
        sizes = {p.microbatch_size or usual for p in ranked[0].plan.pipelines}
        if len(sizes) == 1 and usual not in sizes:
            # The best plan's size becomes the usual one, so the others name theirs.
            workload = replace(workload, sequences_per_microbatch=min(sizes))
            ranked = [replace(item, plan=_with_sizes(item.plan, usual)) for item in ranked]
        result = PlanningResult(
            candidates=tuple(ranked),
            workload=workload,
            lower_bound_s=bound_time_s(
                every, min(item.simulation.iteration_time_s for item in ranked)
            ),
            lower_bound_price=min(prices, default=None),
            objective=objective,
            num_estimated=sum(part.num_columns for part in parts),
            num_simulated=sum(part.judge.num_simulated for part in parts),
        )
        task.progress("Done", 1.0)
        return result

    def _running(self, start: ParallelPlan) -> dict[ParallelPlan, PlannedCandidate]:
        """Return the plan that runs, as it is, if it fits this cluster, model and iteration."""
        judge, usual = Judge(self.every), self.task.workload.sequences_per_microbatch
        samples = sum(
            (p.num_microbatches or 0) * (p.microbatch_size or usual) for p in start.pipelines
        )
        cost = self.task.cost
        is_here = max(start.ranks) < cost.cluster.num_ranks
        is_whole = start.num_layers == cost.model.num_layers
        if not (is_here and is_whole and samples == self.task.workload.global_batch_size):
            return {}
        simulation = judge.simulate(start)
        return {start: priced(start, simulation, cost)} if simulation.fits else {}

    def _on_likely_nodes(self) -> list[FastestPlans]:
        """Return the searches on the sets of nodes that are likely the cheapest.

        Nodes of a class differ in their price only, so a set is a number of nodes of each class,
        the cheapest ones. All nodes and those of each class alone are tried; then, as long as that
        helps, one node more or less than in the best set, half as many or twice as many. A set's
        score is the least seconds of a master times the price.
        """
        cluster, kinds = self.task.cost.cluster, self.every[self.sizes[0]].class_of_node
        each = [(node.price_per_hour or 0.0) / node.count for node in cluster.nodes]
        by_price = sorted(range(len(kinds)), key=each.__getitem__)
        members = [[i for i in by_price if kinds[i] == kind] for kind in dict.fromkeys(kinds)]
        searches: dict[_Numbers, FastestPlans] = {}
        scores: dict[_Numbers, float] = {}
        full = tuple(map(len, members))
        new = {
            full,
            *(tuple(n * (i == own) for i, n in enumerate(full)) for own in range(len(full))),
        }
        while new:
            for numbers in sorted(new):
                chosen = {i for row, n in zip(members, numbers, strict=True) for i in row[:n]}
                counts = [node.count * (i in chosen) for i, node in enumerate(cluster.nodes)]
                stages = {size: self.task.stages(size, counts) for size in self.sizes}
                searches[numbers] = search = FastestPlans(self.task, stages)
                scores[numbers] = (cluster.price_of(chosen) or 0.0) * search.least_s()
            new = _near(min(scores, key=scores.__getitem__), full) - scores.keys()
        ranked = sorted((score, n) for n, score in scores.items() if score < np.inf)[:_KEPT]
        return [searches[numbers] for _, numbers in ranked or [(0.0, full)]]


def _with_sizes(plan: ParallelPlan, usual: int) -> ParallelPlan:
    """Return a plan whose pipelines name the size of micro-batches; where none did, the usual."""
    pipelines = [replace(p, microbatch_size=p.microbatch_size or usual) for p in plan.pipelines]
    return replace(plan, pipelines=tuple(pipelines))


_Numbers = tuple[int, ...]
"""Nodes of each class."""


def _near(best: _Numbers, full: _Numbers) -> set[_Numbers]:
    """Return the sets of one node more or less, half as many or twice as many of a class."""
    found = set()
    for index, number in enumerate(best):
        for other in (number - 1, number + 1, number // 2, number * 2):
            moved = (*best[:index], other, *best[index + 1 :])
            if any(moved) and 0 <= other <= full[index]:
                found.add(moved)
    return found
