"""Find the best plan for a cluster: propose, estimate, simulate, improve (AutoHet Algorithm 1).

1. Arrangements are proposed: all on tiny clusters, else the solvers' favourites
   (`starting_points`).
2. Each gets layers and micro-batches, and is estimated (`estimator`).
3. The best are simulated, and the best of those improved by local search (`local_search`).
4. A lower bound on every plan says how much could be left (`bound`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.planner.arrangement import Arrangement
from lightning_hetero.planner.bound import bound_iteration_price
from lightning_hetero.planner.estimator import Estimate, Estimator
from lightning_hetero.planner.local_search import Candidate, Judge, improve
from lightning_hetero.planner.starting_points import (
    bound_time_s,
    enumerate_arrangements,
    propose_arrangements,
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
_SIMULATED = 24
_SIMULATED_ACTIONS = 1_500_000
_IMPROVED = 3
# Tiny clusters: plans are simulated in a fraction of a millisecond, and there are all of them.
_SIMULATED_ENUMERATED = 150
_IMPROVED_ENUMERATED = 16
_IMPROVE_ACTIONS = 150_000

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
    return _PlanSearch(cost, workload, options, progress or (lambda _what, _share: None)).run()


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
        self.estimator = Estimator(cost, workload, equal_microbatches=options.equal_microbatches)
        self.judge = Judge(self.estimator, self._score)
        self.enumerated = False
        self.tp_degrees = valid_tp_degrees(cost, workload, options)

    def run(self) -> PlanningResult:
        self.progress("Proposing groups", 0.0)
        arrangements = self._arrangements()
        estimates = self._estimate(arrangements)
        if not estimates:
            raise PlanningError(_nowhere(self.cost, self.workload, self.tp_degrees))
        candidates = self._simulate(estimates)
        if not candidates:
            raise PlanningError(_nowhere(self.cost, self.workload, self.tp_degrees))
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
            num_estimated=len(arrangements),
            num_simulated=self.judge.num_simulated,
        )

    def _arrangements(self) -> list[Arrangement]:
        counts = [node.count for node in self.nodes]
        if sum(counts) <= _MAX_ENUMERATED_DEVICES:
            every = enumerate_arrangements(self.estimator, counts, self.tp_degrees, _MAX_ENUMERATED)
            if every is not None:
                self.enumerated = True
                return every
        arrangements: list[Arrangement] = []
        for allowed in self._allowances(counts):
            arrangements += propose_arrangements(self.estimator, allowed, self.tp_degrees)
        return list(dict.fromkeys(arrangements))

    def _allowances(self, counts: Sequence[int]) -> list[list[int]]:
        """Return which nodes may be used; all of them, unless money counts.

        Then nodes are left out one after the other, those with the most money per work first.
        """
        allowances = [list(counts)]
        if self.options.objective is not Objective.COST:
            return allowances

        def money_per_work(node: int) -> float:
            price = (self.nodes[node].price_per_hour or 0.0) / self.nodes[node].count
            return price * self.estimator.seconds_per_device(node, self.tp_degrees)

        order = sorted(range(len(counts)), key=lambda node: (-money_per_work(node), node))
        steps = max(1, len(order) // 16)
        for left_out in range(steps, len(order), steps):
            dropped = set(order[:left_out])
            allowances.append([0 if n in dropped else c for n, c in enumerate(counts)])
        return allowances

    def _estimate(self, arrangements: Sequence[Arrangement]) -> list[Estimate]:
        estimates = []
        for index, arrangement in enumerate(arrangements):
            if index % 256 == 0:
                self.progress("Estimating plans", 0.2 + 0.3 * index / len(arrangements))
            estimate = self.estimator.estimate(arrangement)
            if estimate is not None:
                estimates.append((self._rough_score(estimate), index, estimate))
        estimates.sort(key=lambda entry: entry[:2])
        return [estimate for _, _, estimate in estimates]

    def _simulate(self, estimates: Sequence[Estimate]) -> list[Candidate]:
        """Return the candidates that fit, best first, after simulating the likeliest."""
        scored: list[tuple[float, int, Candidate]] = []
        work = 0
        most = _SIMULATED_ENUMERATED if self.enumerated else _SIMULATED
        for index, estimate in enumerate(estimates):
            enough = len(scored) >= most or (work > _SIMULATED_ACTIONS and scored)
            if enough:
                break
            candidate = Candidate(
                arrangement=estimate.arrangement,
                layers=estimate.layers,
                num_microbatches=estimate.num_microbatches,
            )
            work += self.judge.work_of(candidate)
            score = self.judge.score(candidate)
            if score < float("inf"):
                scored.append((score, index, candidate))
            self.progress("Simulating plans", 0.5 + 0.2 * min(1.0, index / most))
        scored.sort(key=lambda entry: entry[:2])
        return [candidate for _, _, candidate in scored]

    def _improve(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Improve the best candidates, only one of those that differ in nodes alone."""
        distinct: dict[object, Candidate] = {}
        for candidate in candidates:
            kind = sorted(map(self.estimator.key, candidate.arrangement))
            distinct.setdefault(tuple(kind), candidate)
        chosen = list(distinct.values())
        chosen = chosen[: _IMPROVED_ENUMERATED if self.enumerated else _IMPROVED]
        improved = list(candidates)
        for index, candidate in enumerate(chosen):
            self.progress("Improving plans", 0.7 + 0.25 * index / len(chosen))
            improved.append(improve(candidate, self.judge, budget=_IMPROVE_ACTIONS))
        unique = list(dict.fromkeys(improved))
        return sorted(unique, key=self.judge.score)

    def _rough_score(self, estimate: Estimate) -> float:
        if self.options.objective is Objective.COST:
            used = {node for pipeline in estimate.arrangement for node in pipeline.nodes}
            return estimate.time_s * sum(self.nodes[n].price_per_hour or 0.0 for n in sorted(used))
        return estimate.time_s

    def _score(self, found: ParallelPlan, simulation: Simulation) -> float:
        if self.options.objective is Objective.COST:
            return simulation.iteration_time_s * (self._price(found) or 0.0)
        return simulation.iteration_time_s

    def _price(self, found: ParallelPlan) -> float | None:
        used = {self.cost.node_of_rank[rank] for rank in found.ranks}
        return self.cost.cluster.price_of(sorted(used))


def _nowhere(cost: CostModel, workload: Workload, tp_degrees: Sequence[int]) -> str:
    cluster, model = cost.cluster, cost.model
    room = sum(cost.usable_bytes(node.device) * node.count for node in cluster.nodes)
    states = model.num_params * (cost.layout.weight_bytes + cost.layout.summed_bytes)
    states += model.num_params * cost.layout.owned_bytes
    return (
        f"{model.name} fits nowhere: its weights, gradients and optimizer states take "
        f"{states / 2**30:.1f} GiB, activations of {sum(workload.microbatch)} tokens a micro-batch "
        f"come on top, and {cluster.num_ranks} devices have {room / 2**30:.1f} GiB to use (TP "
        f"degrees {list(tp_degrees)}). Add devices, allow a larger TP degree, or shorten the "
        "sequences or micro-batches."
    )
