"""Candidate plans of an iteration, as data modules need them: pipelines, their costs and ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from lightning_hetero.assign import PipelineCost
from lightning_hetero.core.actions import Assignment
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.models.packing import QUADRATIC_WEIGHT

_UNLIMITED = 2**40


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Candidate plans and the costs of their pipelines; the same on every rank.

    Raises:
        ConfigurationError: Costs don't match the plans.
    """

    costs: tuple[tuple[PipelineCost, ...], ...]
    """For each plan its pipelines' costs."""
    plans: tuple[ParallelPlan, ...] | None = None
    """The plans; None if every rank is a pipeline of its own, as under DDP."""

    def __post_init__(self) -> None:
        sizes = [len(costs) for costs in self.costs]
        wanted = sizes if self.plans is None else [plan.num_pipelines for plan in self.plans]
        if not sizes or sizes != wanted:
            raise ConfigurationError(
                f"The candidate plans have {wanted} pipelines but costs are given for {sizes}. "
                "Give a cost for each pipeline of each plan, and at least one plan."
            )

    @classmethod
    def equal_ranks(cls, world_size: int) -> Self:
        """Return the only candidate of a strategy without plans: each rank is a pipeline."""
        cost = PipelineCost(
            a=QUADRATIC_WEIGHT, b=1.0, c=0.0, max_len=_UNLIMITED, util_len=_UNLIMITED, num_stages=1
        )
        return cls(costs=((cost,) * world_size,))

    def first(self) -> Self:
        """Return only the first candidate."""
        plans = None if self.plans is None else self.plans[:1]
        return replace(self, costs=self.costs[:1], plans=plans)

    def pipeline_index(self, plan_index: int, global_rank: int) -> int | None:
        """Return a rank's pipeline under a plan; None if the rank is idle."""
        if self.plans is None:
            return global_rank
        place = self.plans[plan_index].place(global_rank)
        return None if place is None else place.pipeline_index

    def slowed(self, slowdowns: Sequence[float]) -> Self:
        """Return the candidates with each pipeline's costs times its slowest rank's factor.

        Args:
            slowdowns: How many times longer each global rank takes, above 0.

        Raises:
            ConfigurationError: A factor is missing, or isn't above 0.
        """
        if not slowdowns or min(slowdowns) <= 0:
            raise ConfigurationError(
                f"The slowdowns are {list(slowdowns)}; give one for each rank, above 0."
            )

        def factor(plan_index: int, pipeline_index: int) -> float:
            ranks: Sequence[int] = (pipeline_index,)
            if self.plans is not None:
                ranks = self.plans[plan_index].pipelines[pipeline_index].ranks
            if max(ranks) >= len(slowdowns):
                raise ConfigurationError(
                    f"There are {len(slowdowns)} slowdowns but rank {max(ranks)} runs; give one a "
                    "rank."
                )
            return max(slowdowns[rank] for rank in ranks)

        return replace(
            self,
            costs=tuple(
                tuple(_slowed(cost, factor(i, j)) for j, cost in enumerate(pipelines))
                for i, pipelines in enumerate(self.costs)
            ),
        )


def _slowed(cost: PipelineCost, factor: float) -> PipelineCost:
    return replace(cost, a=cost.a * factor, b=cost.b * factor, c=cost.c * factor)


def assumed_costs(
    plan: ParallelPlan, *, context_length: int, tokens_per_step: int
) -> tuple[PipelineCost, ...]:
    """Return assumed costs of a plan's pipelines, for devices without a profile: all are equal.

    A pipeline's time is proportional to the number of layers per rank of its largest stage. Its
    micro-batches have up to `context_length` tokens or, if that is more, an even share of
    `tokens_per_step`.
    """
    limit = max(context_length, -(-tokens_per_step // sum(plan.count_microbatches())))
    costs = []
    for pipeline in plan.pipelines:
        layers = plan.num_layers * max(map(plan.share, pipeline.ranks))
        costs.append(
            PipelineCost(
                a=QUADRATIC_WEIGHT * layers,
                b=layers,
                c=0.0,
                max_len=limit,
                util_len=limit,
                num_stages=len(pipeline.groups),
            )
        )
    return tuple(costs)


def fill_empty(assignment: Assignment) -> Assignment:
    """Give each empty pipeline a sample of the fullest one, since every rank of DDP needs a batch.

    A pipeline's micro-batches are merged into one, because such a rank runs one batch per step.

    Raises:
        ConfigurationError: There are fewer samples than pipelines.
    """
    if assignment.num_samples < len(assignment.microbatches):
        raise ConfigurationError(
            f"An iteration has {assignment.num_samples} samples for "
            f"{len(assignment.microbatches)} ranks. Use a larger tokens_per_step or fewer ranks."
        )
    rows = [[i for batch in batches for i in batch] for batches in assignment.microbatches]
    for row in rows:
        if not row:
            row.append(max(rows, key=len).pop())
    return replace(assignment, microbatches=tuple((tuple(row),) for row in rows))
