"""Plans to compare with: the usual first choices on the same devices."""

from dataclasses import dataclass

from lightning_hetero.cli.arguments import replicated_cost
from lightning_hetero.core.errors import PlanError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.planner import Workload
from lightning_hetero.simulator import CostModel, simulate, split_batch

__all__ = ["Baseline", "find_baselines"]

_MOST_ACTIONS = 1_000_000
"""Most forward and backward passes of a plan that is simulated for comparison."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A usual plan and its predicted iteration time."""

    name: str
    """Its kind, in words."""
    iteration_time_s: float | None
    """Its predicted iteration; None if it doesn't fit."""

    def __str__(self) -> str:
        time_s = self.iteration_time_s
        return f"{self.name}: {'does not fit' if time_s is None else f'{time_s:.4g} s'}"


def find_baselines(
    cost: CostModel, workload: Workload, tp_degrees: tuple[int, ...]
) -> list[Baseline]:
    """Return plain data parallelism and the best equal pipelines, as far as they can be predicted.

    Plain data parallelism keeps the whole model and its optimizer states on every device. Equal
    pipelines have the same stages, TP degree and layers, and equal numbers of micro-batches.
    """
    plain = _best([_even(cost, 1, 1)], replicated_cost(cost), workload)
    num_ranks = cost.cluster.num_ranks
    equal = [
        _even(cost, num_stages, degree)
        for degree in tp_degrees
        for num_stages in range(1, cost.model.num_layers + 1)
        if num_ranks % (num_stages * degree) == 0
    ]
    return [
        Baseline(name="plain data parallel", iteration_time_s=plain),
        Baseline(name="equal pipelines", iteration_time_s=_best(equal, cost, workload)),
    ]


def _even(cost: CostModel, num_stages: int, tp_degree: int) -> ParallelPlan | None:
    """Return equal pipelines whose TP groups stay inside nodes; None if there are none."""
    try:
        plan = ParallelPlan.even(
            world_size=cost.cluster.num_ranks,
            num_layers=cost.model.num_layers,
            num_stages=num_stages,
            tp_degree=tp_degree,
        )
    except PlanError:
        return None
    crosses = any(
        len({cost.node_of_rank[rank] for rank in stage.ranks}) > 1
        for _, _, stage in plan.iter_stages()
    )
    return None if crosses else plan


def _best(plans: list[ParallelPlan | None], cost: CostModel, workload: Workload) -> float | None:
    """Return the shortest iteration of those that fit."""
    times = []
    for plan in plans:
        if plan is None or 2 * workload.num_microbatches * plan.max_stages > _MOST_ACTIONS:
            continue
        batches = split_batch(
            plan,
            global_batch_size=workload.global_batch_size,
            sequence_length=workload.sequence_length,
            microbatch_size=workload.sequences_per_microbatch,
        )
        simulation = simulate(plan, cost, batches)
        if simulation.fits:
            times.append(simulation.iteration_time_s)
    return min(times, default=None)
