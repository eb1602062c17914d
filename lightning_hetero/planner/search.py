"""Find the best plan for a cluster: propose, estimate, simulate, improve (AutoHet Algorithm 1).

1. Arrangements are proposed: all on tiny clusters, else the solvers' favourites
   (`starting_points`).
2. Each gets layers and micro-batches, and is estimated (`estimator`); the likeliest are simulated
   (`shortlist`).
3. The best of those are improved by local search (`improver`).
4. A lower bound on every plan says how much could be left (`bound`).
"""

import copy
import heapq
from collections.abc import Sequence
from dataclasses import replace

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.planner.allowances import Scores
from lightning_hetero.planner.arrangement import Arrangement, used_counts, used_nodes
from lightning_hetero.planner.bound import bound_iteration_price
from lightning_hetero.planner.enumeration import enumerate_arrangements
from lightning_hetero.planner.estimating.estimator import Estimator
from lightning_hetero.planner.host_owners import cost_on_hosts, with_host_owners
from lightning_hetero.planner.improver import Improver
from lightning_hetero.planner.judge import Candidate, Judge
from lightning_hetero.planner.local_search import WORTH_IMPROVING, escape_optima
from lightning_hetero.planner.parts import (
    WORTH_SIMULATING,
    LikelyParts,
    Part,
    of_some_types,
    without_a_node,
    without_another,
)
from lightning_hetero.planner.result import PlannedCandidate, PlanningResult, ProgressCallback
from lightning_hetero.planner.shortlist import Shortlist
from lightning_hetero.planner.starting_points import (
    bound_time_s,
    glance_at,
    propose_arrangements,
    propose_mixed_degrees,
    propose_wide_ends,
)
from lightning_hetero.planner.workload import (
    Objective,
    PlanningOptions,
    Workload,
    explain_no_room,
    valid_tp_degrees,
)
from lightning_hetero.simulator import CostModel, RooflineCost

__all__ = ["PlanSearch", "plan"]

_MAX_ENUMERATED = 12_000
_MAX_ENUMERATED_DEVICES = 6
_SIMULATED = 12
_SIMULATED_DEVICES = 600
"""Devices of all that are simulated on small clusters."""
_SIMULATED_WORK = 1_500_000  # about microseconds
_FEWEST, _THOROUGH, _MOST_EFFORT = 32, 512, 2
"""Devices up to which searches may be thorough; of plans that these improve, a multiple.

With the fewest, they look beyond local optima and search without TP degrees; with more, they search
with less freedom and without some devices as well.
"""
_NEAR_BOUND, _NOT_FAR = 1.1, 1.3
"""A score at most so much above the lower bound leaves little to be found: of the fewest, of more.
"""
_FEW_DEVICES = 64
"""Up to here an improved plan may be far better than where it began."""
_SIMULATED_OF_A_PART = 3
_LEFT_OUT = 4
"""Classes of equal nodes of which one is left out, where devices are many."""
_OF_TYPES = 3
"""Parts of some types only that are searched then, too."""
_LIKELIEST, _LIKELIEST_DEVICES = 48, 4_096
"""Arrangements of another search by which one is judged: more of them where devices are few."""
# Tiny clusters: plans are simulated in a fraction of a millisecond, and there are all of them.
_SIMULATED_ENUMERATED = 150


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
        num_devices = cost.cluster.num_ranks
        self._is_thorough = options.thorough and _MAX_ENUMERATED_DEVICES < num_devices <= _THOROUGH
        self._is_small = num_devices <= _FEWEST
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
        self.shortlist = Shortlist(self.estimators, self.judge, self._weigh)

    def run(self) -> PlanningResult:
        """Search, for plans whose states are on hosts if there is no room on devices.

        Raises:
            PlanningError: The model fits nowhere.
        """
        result = self.run_near(float("inf"))
        if result is not None:
            return result
        relaxed = cost_on_hosts(self.cost)
        found = relaxed and PlanSearch(
            relaxed, self.workload, self.options, self.progress
        ).run_near(float("inf"))
        if not found:
            text = explain_no_room(relaxed or self.cost, self.workload, self.tp_degrees)
            raise PlanningError(text)
        microbatch = self.workload.microbatch
        pairs = [with_host_owners(item.plan, self.cost, microbatch) for item in found.candidates]
        candidates = [
            replace(item, plan=owning, simulation=simulation)
            for item, (owning, simulation) in zip(found.candidates, pairs, strict=True)
        ]
        candidates.sort(key=lambda item: item.score(self.options.objective))
        return replace(found, candidates=tuple(candidates))

    def run_near(self, score: float) -> PlanningResult | None:
        """Return what `run` does if devices alone have room and some plan comes near a score."""
        self.progress("Proposing groups", 0.0)
        candidates = self._simulated(score)
        if not candidates:
            return None
        self.progress("Improving the best plans", 0.6)
        effort = _MOST_EFFORT if self._is_worth_effort(candidates[0]) else 1
        ranked = self._improve(candidates, effort)
        self.shortlist.likely |= {
            item.arrangement: self.judge.score(item) for item in reversed(ranked)
        }
        self.progress("Bounding", 0.95)
        chosen = []
        for candidate in ranked[: self.options.num_candidates]:
            found, simulation = self.judge.plan(candidate)
            used = {self.cost.node_of_rank[rank] for rank in found.ranks}
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
            num_estimated=self.shortlist.num_estimated,
            num_simulated=self.judge.num_simulated,
        )

    def _improve(self, candidates: Sequence[Candidate], effort: float) -> list[Candidate]:
        """Return the candidates and improved ones, best first.

        Where a thorough search ends far above the lower bound, more is improved. Of few devices,
        plans beyond local optima, and of searches without a TP degree of the best plan. Of more,
        what searches find that may do less or lack devices, since they begin elsewhere; and then
        the best with long budgets.
        """
        keeping = [self._keeping[estimator] for estimator in self.estimators]
        improver = Improver(self.judge, self.estimators, keeping, self._find_starts)
        found = improver.improve(candidates, effort)
        if not self._is_worth_effort(found[0]):
            return found
        if self._is_small:
            self.progress("Looking beyond the best plans", 0.8)
            found = escape_optima(found, self.judge, self.estimators)
            self.progress("Searching without TP degrees", 0.9)
            return improver.improve_without_degrees(found, effort)
        self.progress("Searching with less freedom", 0.7)
        found = improver.improve_with_less(found, effort)
        self.progress("Searching without devices", 0.8)
        cluster = self.cost.cluster
        parts = self._likeliest(without_a_node(cluster), _LEFT_OUT)
        parts += self._likeliest(of_some_types(cluster), _OF_TYPES)
        parts = list(dict.fromkeys(parts))
        found = improver.improve_parts(found, parts, self._without_another)
        return improver.improve_longer(found)

    def _likeliest(self, parts: Sequence[Part], most: int) -> list[Part]:
        """Return the parts that look best at a glance, `most` of them."""
        return sorted(parts, key=lambda part: self._glance(part, float("inf"))[0])[:most]

    def _without_another(self, part: Part) -> Part | None:
        return without_another(self.cost.cluster, part)

    def _find_starts(
        self, estimators: Sequence[Estimator], part: Part | None, below: float
    ) -> list[Candidate]:
        """Return the candidates that a search which may do less would improve, best first.

        It is for a part if one is given. Nothing that is far above `below` is looked for.
        """
        apart = self._apart(estimators)
        if part is None:
            found = apart._simulated(below)
        else:
            found = apart._search(part, _SIMULATED, _SIMULATED_WORK, likely=below, below=below)
            found.sort(key=self.judge.score)
        self.shortlist.num_estimated += apart.shortlist.num_estimated
        return found

    def _apart(self, estimators: Sequence[Estimator]) -> "PlanSearch":
        """Return a search that may do less; it shares what is known of candidates."""
        other = copy.copy(self)
        other.estimators, other.estimator = tuple(estimators), estimators[-1]
        other.tp_degrees = other.estimator.tp_degrees
        other.progress = lambda _what, _share: None
        other.shortlist = Shortlist(other.estimators, self.judge, self._weigh)
        return other

    def _is_worth_effort(self, candidate: Candidate) -> bool:
        seconds = self.judge.plan(candidate)[1].iteration_time_s
        return self.is_worth_effort(self.judge.score(candidate), seconds)

    def is_worth_effort(self, score: float, seconds: float) -> bool:
        """Return whether this is a thorough search, and a plan's score far above the lower bound.

        `seconds` are those of the plan's iteration.
        """
        if not self._is_thorough:
            return False
        bound = self.lower_bounds(seconds)[self.options.objective is Objective.COST] or 0.0
        return score > bound * (_NEAR_BOUND if self._is_small else _NOT_FAR)

    def lower_bounds(self, upper_s: float) -> tuple[float, float | None]:
        """Return seconds, and the price, that every plan takes at least.

        `upper_s` are those of a plan that exists.
        """
        counts = [node.count for node in self.nodes]
        bound_s = bound_time_s(self.estimator, counts, self.tp_degrees, upper_s)
        return bound_s, bound_iteration_price(self.estimator, self.tp_degrees)

    def comes_close(self, other: "PlanSearch", score: float) -> bool:
        """Return whether what another search found likeliest could have a better score here."""
        most = max(_LIKELIEST, _LIKELIEST_DEVICES // self.cost.cluster.num_ranks)
        likely = other.shortlist.likely
        likeliest = heapq.nsmallest(most, likely, key=likely.__getitem__)
        estimates = map(self.estimator.estimate, likeliest)
        worst = score * WORTH_IMPROVING
        return not likeliest or any(e and self.shortlist.rough_score(e) < worst for e in estimates)

    def _simulated(self, below: float) -> list[Candidate]:
        """Return the candidates that fit, best first: of the cluster, then of parts of it.

        A part is looked at only where its devices could do better than the best so far, and nothing
        that is far above `below`.
        """
        counts = tuple(node.count for node in self.nodes)
        if sum(counts) <= _MAX_ENUMERATED_DEVICES:
            every = enumerate_arrangements(self.estimator, counts, self.tp_degrees, _MAX_ENUMERATED)
            if every is not None:
                return self.shortlist.simulate(every, _SIMULATED_ENUMERATED, _SIMULATED_WORK, below)
        most = max(_SIMULATED, _SIMULATED_DEVICES // sum(counts))
        parts = LikelyParts(
            self.cost.cluster,
            [self.scores.burden(node, self.tp_degrees) for node in range(len(counts))],
            least=lambda part: self.scores.least(part, self.tp_degrees),
            glance=self._glance,
            progress=lambda share: self.progress("Leaving devices out", 0.4 + 0.1 * share),
        )
        found: list[Candidate] = []
        searched = {counts}
        for first in (parts.far_ahead(below), counts):
            if first is not None:
                searched.add(first)
                likely = min(parts.whole_score, below, self.shortlist.best)
                found += self._search(first, most, _SIMULATED_WORK, likely=likely, below=below)
        limit = self.judge.work_done + _SIMULATED_WORK
        for part in parts.likeliest(min(below, self.shortlist.best)):
            searched.add(part)
            budget = max(0, limit - self.judge.work_done)
            likely = min(below, self.shortlist.best)
            found += self._search(part, _SIMULATED_OF_A_PART, budget, likely=likely, below=below)
        if found:
            # Devices that the best leaves idle, as it is, aren't there for other proposals.
            used = used_counts(min(found, key=self.judge.score).arrangement, len(counts))
            if used not in searched:
                likely = min(below, self.shortlist.best)
                found += self._search(
                    used, _SIMULATED_OF_A_PART, _SIMULATED_WORK, likely=likely, below=below
                )
        return sorted(dict.fromkeys(found), key=self.judge.score)

    def _search(
        self,
        counts: Sequence[int],
        most: int,
        budget: int,
        *,
        likely: float,
        below: float,
    ) -> list[Candidate]:
        """Return the candidates that fit of all proposals for some devices.

        A degree that can't come near a `likely` score by its work is no degree for all pipelines.
        """
        worst = likely * WORTH_SIMULATING
        alone = [tp for tp in self.tp_degrees if self.scores.least(counts, [tp]) <= worst]
        every = propose_arrangements(self.estimator, counts, self.tp_degrees, alone)
        found = self.shortlist.simulate(every, most, budget, below)
        for propose in (propose_mixed_degrees, propose_wide_ends):
            # Apart, so that none takes another one's place.
            more = propose(self.estimator, counts, self.tp_degrees)
            found += self.shortlist.simulate(more, max(most // 2, 3), budget, below)
        return found

    def _glance(self, part: Sequence[int], worst: float) -> tuple[float, int]:
        """Return the best estimate for some devices dealt evenly, and how many were looked at.

        Infinite if none fits or is below `worst`.
        """
        few = glance_at(self.estimator, part, self.tp_degrees)
        return self.shortlist.glance(few, worst), len(few)

    def _weigh(self, time_s: float, arrangement: Arrangement) -> float:
        if self.options.objective is Objective.THROUGHPUT:
            return time_s
        return self.scores.weigh(time_s, used_nodes(arrangement))
