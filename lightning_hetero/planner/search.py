"""Find the best plan for a cluster: propose, estimate, simulate, improve (AutoHet Algorithm 1).

1. Arrangements are proposed: all on tiny clusters, else the solvers' favourites (`starts`).
2. Each gets layers and micro-batches, and is estimated (`estimator`); the likeliest are simulated
   (`shortlist`).
3. The best of those are improved by local search (`improving`).
4. A lower bound on every plan says how much could be left (`bound`).
"""

import heapq
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.planner.allowances import Scores
from lightning_hetero.planner.arrangement import Arrangement, used_nodes
from lightning_hetero.planner.bound import bound_iteration_price
from lightning_hetero.planner.estimating.estimator import Estimator
from lightning_hetero.planner.host_owners import candidates_on_hosts, cost_on_hosts
from lightning_hetero.planner.improving.improver import Improver
from lightning_hetero.planner.improving.local_search import WORTH_IMPROVING, escape_optima
from lightning_hetero.planner.judge import Candidate, Judge
from lightning_hetero.planner.parts import Part, of_some_types, without_a_node, without_another
from lightning_hetero.planner.result import PlannedCandidate, PlanningResult, ProgressCallback
from lightning_hetero.planner.starting_points import bound_time_s
from lightning_hetero.planner.starts import Starts
from lightning_hetero.planner.workload import (
    Objective,
    PlanningOptions,
    Workload,
    explain_no_room,
    valid_tp_degrees,
)
from lightning_hetero.simulator import CostModel, RooflineCost

__all__ = ["PlanSearch", "plan"]

_TRIED_ON_HOSTS = 40
"""Plans of which some may find room for their states on hosts."""
_FEWEST, _THOROUGH, _MOST_EFFORT = 32, 512, 2
"""Devices up to which searches may be thorough; of plans that these improve, a multiple.

With the fewest, they look beyond local optima and search with fewer degrees; with more, they search
with less freedom and without some devices as well.
"""
_NEAR_BOUND, _NOT_FAR = 1.1, 1.3
"""A score at most so much above the lower bound leaves little to be found: of the fewest, of more.
"""
_LEFT_OUT = 4
"""Classes of equal nodes of which one is left out, where devices are many."""
_OF_TYPES = 3
"""Parts of some types only that are searched then, too."""
_LIKELIEST, _LIKELIEST_DEVICES = 48, 4_096
"""Arrangements of another search by which one is judged: more of them where devices are few."""


def plan(
    cluster: Cluster,
    model: ModelSpec,
    workload: Workload,
    options: PlanningOptions | None = None,
    *,
    cost: CostModel | None = None,
    progress: ProgressCallback | None = None,
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

    Raises:
        PlanningError: The model fits nowhere, or an option can't be met.
    """
    cost = cost or RooflineCost(cluster, model)
    return PlanSearch(cost, workload, options or PlanningOptions(), progress).run()


class PlanSearch:
    """One search, with what it has learnt; arguments as for `plan`."""

    def __init__(
        self,
        cost: CostModel,
        workload: Workload,
        options: PlanningOptions,
        progress: ProgressCallback | None = None,
    ) -> None:
        self.cost = cost
        self.workload = workload
        self.options = options
        self.progress = progress or (lambda _what, _share: None)
        self.nodes = cost.cluster.nodes
        self._is_thorough = options.thorough and cost.cluster.num_ranks <= _THOROUGH
        self._is_small = cost.cluster.num_ranks <= _FEWEST
        if options.objective is Objective.COST and cost.cluster.price_per_hour is None:
            raise PlanningError(
                "Planning for cost needs the price of every node. Give each node a price_per_hour "
                "in the cluster file, or plan for throughput."
            )
        self.tp_degrees = valid_tp_degrees(cost, workload, options)
        # Nodes that only own would have to be paid for as well.
        equal = Estimator(
            cost,
            workload,
            equal_microbatches=True,
            idle_may_own=options.objective is Objective.THROUGHPUT,
            tp_degrees=self.tp_degrees,
        )
        self.estimators: tuple[Estimator, ...] = (equal,)
        if not options.equal_microbatches:
            self.estimators += (equal.unequal(),)
        self.estimator = self.estimators[-1]
        keeping = equal.keeping()
        self._keeping = {e: keeping if e is equal else keeping.unequal() for e in self.estimators}
        self.scores = Scores(equal, options.objective)
        self.judge = Judge(self.estimator, self._weigh, self._keeping)
        self.starts = Starts(self.judge, self.estimators, self.scores, self._weigh, self.progress)
        self._bounds: tuple[float, float | None] | None = None

    def run(self) -> PlanningResult:
        """Search, for plans whose states are on hosts as well if devices have little room for them.

        That is, if they have none, or if a thorough search ends far above the lower bound.

        Raises:
            PlanningError: The model fits nowhere.
        """
        found = self.run_near(float("inf"))
        if found is not None and not self._is_worth_hosts(found.gap):
            return found
        try:
            on_hosts = self._run_on_hosts()
        except PlanningError:
            if found is None:
                raise
            return found
        if found is None:
            return on_hosts
        bound_s = min(found.lower_bound_s, on_hosts.lower_bound_s)
        return replace(min(found, on_hosts, key=self.score), lower_bound_s=bound_s)

    def _is_worth_hosts(self, gap: float) -> bool:
        has_hosts = cost_on_hosts(self.cost) is not None
        return self.options.thorough and gap > _NEAR_BOUND - 1 and has_hosts

    def _run_on_hosts(self) -> PlanningResult:
        """Return plans that keep states on hosts where devices lack room, best first.

        Raises:
            PlanningError: The model fits nowhere, not with states on hosts either.
        """
        relaxed, most = cost_on_hosts(self.cost), self.options.num_candidates
        found = None
        if relaxed is not None:
            options = replace(self.options, num_candidates=max(most, _TRIED_ON_HOSTS))
            search = PlanSearch(relaxed, self.workload, options, self.progress)
            found = search.run_near(float("inf"))
        if found is None:
            text = explain_no_room(relaxed or self.cost, self.workload, self.tp_degrees)
            raise PlanningError(text)
        candidates = candidates_on_hosts(found, self.cost)
        return replace(found, candidates=candidates[:most])

    def run_near(self, score: float) -> PlanningResult | None:
        """Return what `run` does if devices alone have room and some plan comes near a score."""
        self.progress("Proposing groups", 0.0)
        candidates = self.starts.find(score)
        if not candidates:
            return None
        self.progress("Improving the best plans", 0.6)
        effort = _MOST_EFFORT if self._is_worth_effort(candidates[0]) else 1
        ranked = self._improve(candidates, effort)
        self.starts.shortlist.likely |= {
            item.arrangement: self.judge.score(item) for item in reversed(ranked)
        }
        self.progress("Bounding", 0.95)
        chosen = []
        for candidate in ranked[: self.options.num_candidates]:
            found, simulation = self.judge.plan(candidate)
            owners = [rank for rank, share in enumerate(found.owner_shares or ()) if share]
            used = {self.cost.node_of_rank[rank] for rank in (*found.ranks, *owners)}
            price = self.cost.cluster.price_of(sorted(used))
            chosen.append(PlannedCandidate(plan=found, simulation=simulation, price_per_hour=price))
        fastest = min(entry.simulation.iteration_time_s for entry in chosen)
        bound_s, bound_price = self.lower_bounds(fastest)
        self.progress("Done", 1.0)
        return PlanningResult(
            candidates=tuple(chosen),
            workload=self.workload,
            lower_bound_s=bound_s,
            lower_bound_price=bound_price,
            objective=self.options.objective,
            num_estimated=self.starts.shortlist.num_estimated,
            num_simulated=self.judge.num_simulated,
        )

    def _improve(self, candidates: Sequence[Candidate], effort: float) -> list[Candidate]:
        """Return the candidates and improved ones, best first.

        Where a thorough search ends far above the lower bound, more is improved. Of few devices,
        plans beyond local optima, and of searches with fewer TP degrees. Of more, what searches
        find that may do less or lack devices, since they begin elsewhere; and then the likeliest
        starts and the best plans with long budgets.
        """
        keeping = [self._keeping[estimator] for estimator in self.estimators]
        improver = Improver(self.judge, self.estimators, keeping, self.starts.find_with_less)
        found = improver.improve(candidates, effort)
        if not self._is_worth_effort(found[0]):
            return found
        if self._is_small:
            self.progress("Looking beyond the best plans", 0.8)
            found = escape_optima(found, self.judge, self.estimators)
            self.progress("Searching with fewer TP degrees", 0.9)
            return improver.improve_with_fewer_degrees(found, effort)
        self.progress("Searching with less freedom", 0.7)
        found = improver.improve_with_less(found, effort)
        self.progress("Searching without devices", 0.8)
        cluster = self.cost.cluster
        parts = self._likeliest(without_a_node(cluster), _LEFT_OUT)
        parts += self._likeliest(of_some_types(cluster), _OF_TYPES)
        parts = list(dict.fromkeys(parts))
        found = improver.improve_parts(found, parts, partial(without_another, cluster))
        self.progress("Taking longer over the likeliest plans", 0.9)
        return improver.improve_longer(improver.improve_starts(found, candidates))

    def _likeliest(self, parts: Sequence[Part], most: int) -> list[Part]:
        """Return the parts that look best at a glance, `most` of them."""
        return sorted(parts, key=lambda part: self.starts.glance(part, float("inf"))[0])[:most]

    def is_worth_running(self, quick: PlanningResult) -> bool:
        """Return whether this search may find more than a quick one that found `quick`."""
        seconds = quick.best.simulation.iteration_time_s
        return self._is_far(self.score(quick), seconds) or self._is_worth_hosts(quick.gap)

    def _is_worth_effort(self, candidate: Candidate) -> bool:
        seconds = self.judge.plan(candidate)[1].iteration_time_s
        return self._is_far(self.judge.score(candidate), seconds)

    def _is_far(self, score: float, seconds: float) -> bool:
        """Return whether this is a thorough search, and a plan's score far above the lower bound.

        `seconds` are those of the plan's iteration.
        """
        if not self._is_thorough:
            return False
        bound = self.lower_bounds(seconds)[self.options.objective is Objective.COST] or 0.0
        is_far = score > bound * (_NEAR_BOUND if self._is_small else _NOT_FAR)
        return is_far and not self.starts.is_complete

    def lower_bounds(self, upper_s: float) -> tuple[float, float | None]:
        """Return seconds, and the price, that every plan takes at least.

        `upper_s` are those of a plan that exists.
        """
        if self._bounds is None:
            counts = [node.count for node in self.nodes]
            bound_s = bound_time_s(self.estimator, counts, self.tp_degrees, upper_s)
            self._bounds = bound_s, bound_iteration_price(self.estimator, self.tp_degrees)
        bound_s, price = self._bounds
        return min(bound_s, upper_s), price

    def score(self, result: PlanningResult) -> float:
        """Return the score of a result's best plan, as the search weighs it.

        It is above 0 for the price of nodes that cost nothing, so that the fastest is the best.
        """
        best = result.best
        nodes = sorted({self.cost.node_of_rank[rank] for rank in best.plan.ranks})
        return self.scores.weigh(best.simulation.iteration_time_s, nodes)

    def comes_close(self, other: "PlanSearch", score: float) -> bool:
        """Return whether what another search found likeliest could have a better score here."""
        most = max(_LIKELIEST, _LIKELIEST_DEVICES // self.cost.cluster.num_ranks)
        likely = other.starts.shortlist.likely
        likeliest = heapq.nsmallest(most, likely, key=likely.__getitem__)
        estimates = map(self.estimator.estimate, likeliest)
        worst = score * WORTH_IMPROVING
        rough_score = self.starts.shortlist.rough_score
        return not likeliest or any(each and rough_score(each) < worst for each in estimates)

    def _weigh(self, time_s: float, arrangement: Arrangement) -> float:
        if self.options.objective is Objective.THROUGHPUT:
            return time_s
        return self.scores.weigh(time_s, used_nodes(arrangement))
