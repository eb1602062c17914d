"""The result of a search: ranked plans, and how good the best one is."""

from collections.abc import Callable
from dataclasses import dataclass

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.planner.workload import Objective, Workload
from lightning_hetero.simulator import Simulation

ProgressCallback = Callable[[str, float], None]
"""Called with what is being done and the share that is done, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class PlannedCandidate:
    """One plan and its prediction."""

    plan: ParallelPlan
    """The plan, with micro-batches for every pipeline."""
    simulation: Simulation
    """Its simulated iteration."""
    price_per_hour: float | None
    """Price of the nodes that it uses; None if one has no price."""

    def score(self, objective: Objective) -> float:
        """Return an iteration's seconds, or their price if that is the objective and is known."""
        time_s, price = self.simulation.iteration_time_s, self.price_per_hour
        return (
            price / 3600 * time_s if objective is Objective.COST and price is not None else time_s
        )

    def money_per_token(self, num_tokens: int) -> float | None:
        """Return the price of a token, given the tokens of an iteration."""
        if self.price_per_hour is None:
            return None
        return self.price_per_hour / 3600 * self.simulation.iteration_time_s / num_tokens


@dataclass(frozen=True, kw_only=True)
class PlanningResult:
    """The plans of a search, the best one first, and a bound on all plans.

    ::

        result = plan(cluster, ModelSpec.load("llama-7b"), workload)
        result.best.plan.save("plan.json")
        print(f"{result.tokens_per_s:.0f} tokens/s, at most {result.gap:.1%} from the best plan")
    """

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
    """Number of arrangements considered."""
    num_simulated: int
    """Number of plans simulated."""

    @property
    def best(self) -> PlannedCandidate:
        """The best plan."""
        return self.candidates[0]

    @property
    def score(self) -> float:
        """The objective of the best plan: seconds of an iteration, or their price."""
        return self.best.score(self.objective)

    @property
    def gap(self) -> float:
        """How much worse than the lower bound of the objective the best plan is, as a share."""
        if self.objective is Objective.COST and self.lower_bound_price:
            return self.score / self.lower_bound_price - 1.0
        return self.best.simulation.iteration_time_s / self.lower_bound_s - 1.0

    @property
    def tokens_per_s(self) -> float:
        """Predicted throughput of the best plan."""
        return self.best.simulation.tokens_per_s(self.workload.num_tokens)

    @property
    def limit(self) -> str:
        """The bottleneck of the best plan, in words."""
        return self.best.simulation.bottleneck
