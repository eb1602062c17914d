"""Find the best plan for a cluster: columns, placed, judged and improved.

1. A master for each number of pipelines worth trying says how often each column runs (`master`).
2. Its whole numbers are placed on nodes in two orders, and simulated (`placement`, `judge`).
3. The best plans, and the one that runs, are improved by local search (`improve`).
4. A lower bound on every plan says how much could be left (`bound`).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.planner.bound import bound_price, bound_time_s
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
"""Most sets of nodes that the grid tries: enough for three classes of up to eight nodes."""
_STEPS = 8
"""Most rounds in which the best set gets one node more or one less."""
_KEPT = 3
"""Sets of nodes, those of the best scores, for which plans are made."""
_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Sequences of a micro-batch to choose from; more only fill memory."""


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
    task = SearchTask(cost, workload, options, degrees, progress or (lambda _what, _share: None))
    found = _Search(task, sizes).run(start)
    relaxed = cost_on_hosts(cost)
    if relaxed is None or (found is not None and found.gap < _HOSTS_GAP):
        if found is None:
            raise PlanningError(explain_no_room(cost, workload, degrees))
        return found
    # The fastest plans may need more of a host than it has, so all of them are kept.
    every = replace(options, num_candidates=_ON_HOSTS)
    on_hosts = _Search(replace(task, cost=relaxed, options=every), sizes).run(None)
    if on_hosts is None:
        if found is None:
            raise PlanningError(explain_no_room(relaxed, workload, degrees))
        return found
    try:
        kept = replace(
            on_hosts, candidates=candidates_on_hosts(on_hosts, cost)[: options.num_candidates]
        )
    except PlanningError:
        if found is None:
            raise
        return found
    if found is None:
        return kept
    bound_s = min(found.lower_bound_s, kept.lower_bound_s)
    return replace(min(found, kept, key=lambda item: item.score), lower_bound_s=bound_s)


_ON_HOSTS = 1_000
"""Most plans with states on hosts; those whose hosts lack memory are dropped afterwards."""
_HOSTS_GAP = 0.1
"""Plans with states on hosts are searched only if others are so far above the bound."""


class _Search:
    """One search over sizes of micro-batches and, for cost, over sets of nodes."""

    def __init__(self, task: SearchTask, sizes: Sequence[int]) -> None:
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
            part = self._on(counts) if counts else FastestPlans(task, every)
            for item in part.run(start):
                found.setdefault(item.plan, item)
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
        """Return the search on some devices of each node."""
        stages = {size: self.task.stages(size, counts) for size in self.sizes}
        return FastestPlans(self.task, stages)

    def _node_sets(self, every: dict[int, Stages]) -> Sequence[Sequence[int] | None]:
        """Return devices of each node that may be used: all, and for cost the likeliest sets."""
        if not self.is_cost:
            return [None]
        class_of_node = every[self.sizes[0]].class_of_node
        cluster = self.task.cost.cluster
        return _likeliest_node_sets(cluster, class_of_node, lambda n: self._on(n).least_s())


def _likeliest_node_sets(
    cluster: Cluster, class_of_node: Sequence[int], least_s: Callable[[Sequence[int]], float]
) -> list[list[int]]:
    """Return devices of each node that may be used, for the likeliest sets of nodes.

    Nodes of a class differ in their price only, so a set is a number of nodes of each class, the
    cheapest ones. Its score is the least seconds of the master times the price of its nodes.
    Numbers are tried on a grid of powers of two, then one node more or less from the best.

    Args:
        cluster: The nodes, all with prices.
        class_of_node: Class of each node.
        least_s: Returns the least seconds of an iteration with so many devices of each node.
    """
    members: dict[int, list[int]] = {}
    for index, kind in enumerate(class_of_node):
        members.setdefault(kind, []).append(index)
    for row in members.values():
        row.sort(key=lambda index: (_price(cluster, index), index))
    scores: dict[tuple[int, ...], tuple[float, float]] = {}

    def rate(numbers: tuple[int, ...]) -> None:
        if numbers not in scores and any(numbers):
            chosen = _chosen(members, numbers)
            seconds = least_s(_counts(cluster, chosen))
            scores[numbers] = seconds * (cluster.price_of(chosen) or 0.0), seconds

    full = tuple(len(row) for row in members.values())
    for numbers in itertools.chain([full], _grid(full)):
        rate(numbers)
    for _ in range(_STEPS):
        best, before = min(scores, key=scores.__getitem__), len(scores)
        for index, step in itertools.product(range(len(full)), (-1, 1)):
            moved = tuple(n + step * (i == index) for i, n in enumerate(best))
            if 0 <= moved[index] <= full[index]:
                rate(moved)
        if len(scores) == before:
            break
    likeliest = sorted(scores, key=scores.__getitem__)[:_KEPT]
    return [_counts(cluster, _chosen(members, numbers)) for numbers in likeliest]


def _grid(full: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield all nodes of one class alone, and powers of two of each class."""
    yield from (tuple(n * (i == only) for i, n in enumerate(full)) for only in range(len(full)))
    steps = [
        sorted({0, *(2**i for i in range(most.bit_length()) if 2**i < most), most}) for most in full
    ]
    yield from itertools.islice(itertools.product(*steps), _GRID)


def _price(cluster: Cluster, index: int) -> float:
    node = cluster.nodes[index]
    return (node.price_per_hour or 0.0) / node.count


def _chosen(members: dict[int, list[int]], numbers: Sequence[int]) -> set[int]:
    return {i for row, n in zip(members.values(), numbers, strict=True) for i in row[:n]}


def _counts(cluster: Cluster, chosen: set[int]) -> list[int]:
    return [node.count * (index in chosen) for index, node in enumerate(cluster.nodes)]
