"""Find the best plan for a cluster: propose, estimate, simulate, improve (AutoHet Algorithm 1).

1. Arrangements are proposed: all on tiny clusters, else the solvers' favourites
   (`starting_points`).
2. Each gets layers and micro-batches, and is estimated (`estimator`).
3. The best are simulated, and the best of those improved by local search (`local_search`).
4. A lower bound on every plan says how much could be left (`bound`).
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.planner.allowances import smaller_allowances
from lightning_hetero.planner.arrangement import Arrangement
from lightning_hetero.planner.bound import bound_iteration_price
from lightning_hetero.planner.enumeration import enumerate_arrangements
from lightning_hetero.planner.estimator import Estimate, Estimator
from lightning_hetero.planner.host_owners import cost_on_hosts, with_host_owners
from lightning_hetero.planner.local_search import Candidate, Judge, improve
from lightning_hetero.planner.starting_points import (
    bound_time_s,
    propose_arrangements,
    propose_mixed_degrees,
)
from lightning_hetero.planner.workload import (
    Objective,
    PlanningOptions,
    Workload,
    valid_tp_degrees,
)
from lightning_hetero.simulator import CostModel, RooflineCost, Simulation

__all__ = ["PlannedCandidate", "PlanningResult", "ProgressCallback", "plan"]

_MAX_ENUMERATED = 12_000
_MAX_ENUMERATED_DEVICES = 6
_SIMULATED = 12
_SIMULATED_ACTIONS = 1_500_000
_SIMULATED_OF_A_PART = 3
_WORTH_SIMULATING = 1.05
"""A part's estimate may be so much above the best simulated plan."""
_LEAST_OVERHEAD = 1.02
"""Bubbles and exchange make an iteration at least so much longer than its work."""
_ESTIMATED_STAGES_OF_PARTS = 60_000
"""Arrangements of parts that are estimated, times their devices."""
_IMPROVED = 3
# Tiny clusters: plans are simulated in a fraction of a millisecond, and there are all of them.
_SIMULATED_ENUMERATED = 150
_IMPROVED_ENUMERATED = 16
_IMPROVE_ACTIONS = 100_000
_IMPROVE_ACTIONS_EQUAL = 50_000

ProgressCallback = Callable[[str, float], None]
"""Called with what is being done and the share that is done, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class PlannedCandidate:
    """One plan and what it is predicted to take."""

    plan: ParallelPlan
    """The plan, with micro-batches for every pipeline."""
    simulation: Simulation
    """Its simulated iteration."""
    price_per_hour: float | None
    """Price of the nodes that it uses; None if one has none."""

    def money_per_token(self, num_tokens: int) -> float | None:
        """Return the price of a token, given the tokens of an iteration."""
        if self.price_per_hour is None:
            return None
        return self.price_per_hour / 3600 * self.simulation.iteration_time_s / num_tokens


@dataclass(frozen=True, kw_only=True)
class PlanningResult:
    """Ranked plans and how good the best one is."""

    candidates: tuple[PlannedCandidate, ...]
    """Best first; at least one."""
    workload: Workload
    """The iteration that was planned for."""
    lower_bound_s: float
    """No plan for this cluster has a shorter iteration."""
    lower_bound_price: float | None
    """No plan for this cluster has a cheaper iteration; None if a node has no price."""
    objective: Objective
    """The quantity that was minimised."""
    num_estimated: int
    """Arrangements looked at."""
    num_simulated: int
    """Plans simulated."""

    @property
    def best(self) -> PlannedCandidate:
        """The best plan."""
        return self.candidates[0]

    @property
    def gap(self) -> float:
        """How much worse than the lower bound of the objective the best plan is, as a share."""
        time_s = self.best.simulation.iteration_time_s
        price = self.best.price_per_hour
        if self.objective is Objective.COST and price is not None and self.lower_bound_price:
            return price / 3600 * time_s / self.lower_bound_price - 1.0
        return time_s / self.lower_bound_s - 1.0

    @property
    def tokens_per_s(self) -> float:
        """Predicted throughput of the best plan."""
        return self.best.simulation.tokens_per_s(self.workload.num_tokens)

    @property
    def limit(self) -> str:
        """The bottleneck of the best plan, in words."""
        return self.best.simulation.bottleneck


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
    options = options or PlanningOptions()
    cost = cost or RooflineCost(cluster, model)
    progress = progress or (lambda _what, _share: None)
    try:
        return _PlanSearch(cost, workload, options, progress).run()
    except _FitsNowhere:
        relaxed = cost_on_hosts(cost)
        if relaxed is None:
            raise
    found = _PlanSearch(relaxed, workload, options, progress).run()
    pairs = [with_host_owners(item.plan, cost, workload.microbatch) for item in found.candidates]
    candidates = [
        replace(item, plan=owning, simulation=simulation)
        for item, (owning, simulation) in zip(found.candidates, pairs, strict=True)
    ]
    candidates.sort(key=lambda item: item.simulation.iteration_time_s)
    return replace(found, candidates=tuple(candidates))


class _FitsNowhere(PlanningError):
    """No plan has room for the model on devices alone."""


class _PlanSearch:
    def __init__(
        self,
        cost: CostModel,
        workload: Workload,
        options: PlanningOptions,
        progress: ProgressCallback,
    ) -> None:
        self.cost = cost
        self.workload = workload
        self.options = options
        self.progress = progress
        self.nodes = cost.cluster.nodes
        if options.objective is Objective.COST and cost.cluster.price_per_hour is None:
            raise PlanningError(
                "Planning for cost needs the price of every node. Give each node a price_per_hour "
                "in the cluster file, or plan for throughput."
            )
        # Nodes that only own would have to be paid for as well.
        equal = Estimator(
            cost,
            workload,
            equal_microbatches=True,
            idle_may_own=options.objective is Objective.THROUGHPUT,
        )
        self.estimators = (equal,) if options.equal_microbatches else (equal, equal.unequal())
        self.estimator = self.estimators[-1]
        self.judge = Judge(self.estimator, self._score)
        self.enumerated = False
        self.num_estimated = 0
        self.tp_degrees = valid_tp_degrees(cost, workload, options)

    def run(self) -> PlanningResult:
        self.progress("Proposing groups", 0.0)
        candidates = self._simulated()
        if not candidates:
            raise _FitsNowhere(_nowhere(self.cost, self.workload, self.tp_degrees))
        ranked = self._improve(candidates)
        self.progress("Bounding", 0.95)
        chosen = []
        for candidate in ranked[: self.options.num_candidates]:
            found = self.judge.plan(candidate)
            chosen.append(
                PlannedCandidate(
                    plan=found,
                    simulation=self.judge.simulate(found),
                    price_per_hour=self._price(found),
                )
            )
        fastest = min(entry.simulation.iteration_time_s for entry in chosen)
        counts = [node.count for node in self.nodes]
        bound = bound_time_s(self.estimator, counts, self.tp_degrees, fastest)
        self.progress("Done", 1.0)
        return PlanningResult(
            candidates=tuple(chosen),
            workload=self.workload,
            lower_bound_s=bound,
            lower_bound_price=bound_iteration_price(self.estimator, self.tp_degrees),
            objective=self.options.objective,
            num_estimated=self.num_estimated,
            num_simulated=self.judge.num_simulated,
        )

    def _simulated(self) -> list[Candidate]:
        """Return the candidates that fit, best first: of the cluster, then of parts of it.

        A part is looked at only where its devices could do better than the best so far.
        """
        counts = tuple(node.count for node in self.nodes)
        if sum(counts) <= _MAX_ENUMERATED_DEVICES:
            every = enumerate_arrangements(self.estimator, counts, self.tp_degrees, _MAX_ENUMERATED)
            if every is not None:
                self.enumerated = True
                return self._simulate(every, _SIMULATED_ENUMERATED, _SIMULATED_ACTIONS)
        every = propose_arrangements(self.estimator, counts, self.tp_degrees)
        self.progress("Estimating and simulating", 0.2)
        found = self._simulate(every, _SIMULATED, _SIMULATED_ACTIONS)
        best = min(map(self.judge.score, found), default=float("inf"))
        mixed = propose_mixed_degrees(self.estimator, counts, self.tp_degrees)
        found += self._simulate(mixed, _SIMULATED_OF_A_PART, _SIMULATED_ACTIONS, below=best)
        burden = [self._burden(node) for node in range(len(counts))]
        limit = self.judge.work_done + _SIMULATED_ACTIONS
        left = _ESTIMATED_STAGES_OF_PARTS
        parts = smaller_allowances(self.cost.cluster, burden)
        # A cluster without a type is asked for first: the budget must not end before it.
        parts.sort(key=lambda part: not part.is_thorough)
        for number, (part, is_thorough) in enumerate(parts):
            self.progress("Leaving devices out", 0.4 + 0.2 * number / len(parts))
            best = min(map(self.judge.score, found), default=float("inf"))
            if left <= 0 or self._least_score(part) * _LEAST_OVERHEAD >= best:
                continue
            arrangements = propose_arrangements(
                self.estimator, part, self.tp_degrees, is_thorough=is_thorough
            )
            left -= len(arrangements) * sum(part)
            budget = limit - self.judge.work_done
            found += self._simulate(arrangements, _SIMULATED_OF_A_PART, budget, below=best)
        return sorted(dict.fromkeys(found), key=self.judge.score)

    def _burden(self, node: int) -> float:
        """Return what a device's work costs on a node: seconds, or money if that counts."""
        seconds = self.estimator.seconds_per_device(node, self.tp_degrees)
        if self.options.objective is Objective.COST:
            return seconds * (self.nodes[node].price_per_hour or 0.0) / self.nodes[node].count
        return seconds

    def _least_score(self, part: Sequence[int]) -> float:
        """Return about the least score of plans on a part of the cluster, by its work alone."""
        used = [node for node, count in enumerate(part) if count]
        power = sum(
            part[node] / self.estimator.seconds_per_device(node, self.tp_degrees) for node in used
        )
        if not power:
            return float("inf")
        return self._weighted(self.workload.num_microbatches / power, used)

    def _simulate(
        self,
        arrangements: Sequence[Arrangement],
        most: int,
        budget: int,
        below: float = float("inf"),
    ) -> list[Candidate]:
        """Return the candidates that fit, best first, after simulating the likeliest.

        Equal shares are tried as well, as if they alone were allowed: whatever a search with them
        would simulate is simulated here. Stops at estimates that are far above `below`.
        """
        self.num_estimated += len(arrangements)
        fitting: list[Candidate] = []
        for estimator in self.estimators:
            limit = self.judge.work_done + budget
            num_fitting = 0
            worst = below * _WORTH_SIMULATING
            for estimate in self._estimate(arrangements, estimator, most, worst):
                enough = num_fitting >= most or self._rough_score(estimate) > worst
                if enough or (self.judge.work_done > limit and fitting):
                    break
                candidate = Candidate(
                    arrangement=estimate.arrangement,
                    layers=estimate.layers,
                    num_microbatches=estimate.num_microbatches,
                )
                if self.judge.score(candidate) < float("inf"):
                    fitting.append(candidate)
                    num_fitting += 1
        return sorted(dict.fromkeys(fitting), key=self.judge.score)

    def _estimate(
        self, arrangements: Sequence[Arrangement], estimator: Estimator, most: int, worst: float
    ) -> list[Estimate]:
        """Return the best estimates first: `most` of them, and others that were met on the way.

        Arrangements that would take too long even without bubbles and exchange are left out, and
        those that would then score above `worst`.
        """
        least = [
            self._weighted(estimator.least_s(arrangement), _nodes_of(arrangement))
            for arrangement in arrangements
        ]
        estimates: list[tuple[float, int, Estimate]] = []
        for index in sorted(range(len(least)), key=least.__getitem__):
            enough = len(estimates) >= most and least[index] > estimates[most - 1][0]
            if enough or least[index] > worst:
                break
            estimate = estimator.estimate(arrangements[index])
            if estimate is not None:
                bisect.insort(estimates, (self._rough_score(estimate), index, estimate))
        return [estimate for _, _, estimate in estimates]

    def _improve(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Improve the best candidates, only one of those that differ in nodes alone.

        What can be had with equal shares is improved first, with equal shares.
        """
        self.progress("Improving the best plans", 0.6)
        found = list(candidates)
        most = _IMPROVED_ENUMERATED if self.enumerated else _IMPROVED
        for estimator in self.estimators:
            equal = estimator.equal_microbatches
            budget = _IMPROVE_ACTIONS_EQUAL if equal else _IMPROVE_ACTIONS
            distinct: dict[object, Candidate] = {}
            for candidate in sorted(found, key=self.judge.score):
                if equal and not _has_equal_shares(candidate):
                    continue
                kind = sorted(map(self.estimator.key, candidate.arrangement))
                distinct.setdefault(tuple(kind), candidate)
            for candidate in list(distinct.values())[:most]:
                found.append(improve(candidate, self.judge, estimator, budget=budget))
        return sorted(dict.fromkeys(found), key=self.judge.score)

    def _rough_score(self, estimate: Estimate) -> float:
        return self._weighted(estimate.time_s, _nodes_of(estimate.arrangement))

    def _score(self, found: ParallelPlan, simulation: Simulation) -> float:
        used = {self.cost.node_of_rank[rank] for rank in found.ranks}
        return self._weighted(simulation.iteration_time_s, sorted(used))

    def _weighted(self, time_s: float, nodes: Sequence[int]) -> float:
        """Return what to minimise: seconds, or their price on some nodes."""
        if self.options.objective is Objective.COST:
            return time_s * (self.cost.cluster.price_of(nodes) or 0.0)
        return time_s

    def _price(self, found: ParallelPlan) -> float | None:
        used = {self.cost.node_of_rank[rank] for rank in found.ranks}
        return self.cost.cluster.price_of(sorted(used))


def _nodes_of(arrangement: Arrangement) -> list[int]:
    return sorted({node for pipeline in arrangement for node in pipeline.nodes})


def _has_equal_shares(candidate: Candidate) -> bool:
    return max(candidate.num_microbatches) - min(candidate.num_microbatches) <= 1


def _nowhere(cost: CostModel, workload: Workload, tp_degrees: Sequence[int]) -> str:
    cluster, model = cost.cluster, cost.model
    room = sum(cost.usable_bytes(node.device) * node.count for node in cluster.nodes)
    states = model.num_params * (cost.layout.weight_bytes + cost.layout.summed_bytes)
    states += model.num_params * cost.layout.device_kept_bytes
    return (
        f"{model.name} fits nowhere: its weights, gradients and optimizer states take "
        f"{states / 2**30:.1f} GiB, activations of {sum(workload.microbatch)} tokens a micro-batch "
        f"come on top, and {cluster.num_ranks} devices have {room / 2**30:.1f} GiB to use (TP "
        f"degrees {list(tp_degrees)}). Add devices, allow a larger TP degree, shorten the "
        "sequences or micro-batches, or say how much host_memory_bytes every node has for states."
    )
