"""Run searches in another process, before their results are needed.

A plan follows from the inputs of its search, and these can be pickled. So while training goes on,
another process of low priority can search for the plan that training needs if a rank is lost.
"""

import os
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.process import answer_questions
from lightning_hetero.core.profile import Profile
from lightning_hetero.planner.proposing.candidate_plans import (
    CandidateOptions,
    CandidatePlans,
    propose_plans,
)
from lightning_hetero.planner.result import PlanningResult
from lightning_hetero.planner.scheduled import rank_scheduled
from lightning_hetero.planner.search import plan, plan_best_size
from lightning_hetero.planner.workload import PlanningOptions, Workload
from lightning_hetero.schedules import Schedule
from lightning_hetero.simulator import CostModel, StateLayout, choose_cost

_NICENESS = 15
_Answer_co = TypeVar("_Answer_co", covariant=True)


class Task(Protocol[_Answer_co]):
    """A computation for another process; equal tasks have equal answers."""

    def solve(self) -> _Answer_co:
        """Return the answer."""


@dataclass(frozen=True, kw_only=True)
class PlanBasis:
    """All that a predicted time depends on besides the plan: one basis makes plans comparable."""

    cluster: Cluster
    model: ModelSpec
    states: StateLayout
    workload: Workload
    profile: Profile | None
    """Measured costs; None if data sheets are used."""

    def cost(self) -> CostModel:
        """Return the cost model by which plans are judged."""
        return choose_cost(self.cluster, self.model, self.profile, layout=self.states)


@dataclass(frozen=True, kw_only=True)
class PlanningTask:
    """All inputs of a search."""

    basis: PlanBasis
    options: PlanningOptions
    sizes: tuple[int, ...] = ()
    """Sizes of micro-batches to choose from; if empty, micro-batches have the workload's size."""
    schedule: Schedule = Schedule.ONE_F_ONE_B
    """The schedule that will run; the best plans are simulated again under it."""

    def solve(self) -> PlanningResult | PlanningError:
        """Return the best plans, or the error if there are none."""
        basis, cost = self.basis, self.basis.cost()
        try:
            if self.sizes:
                found = plan_best_size(cost, basis.workload, self.options, sizes=self.sizes)
            else:
                found = plan(basis.cluster, basis.model, basis.workload, self.options, cost=cost)
        except PlanningError as error:
            return error
        return rank_scheduled(found, cost, self.schedule)[0]


@dataclass(frozen=True, kw_only=True)
class ProposalTask:
    """All inputs of candidate plans for samples of different lengths (Hydraulis §7)."""

    typical: PlanningTask
    """The search for samples of one typical length; its best plan becomes a candidate, too."""
    lengths: tuple[int, ...]
    """Tokens of each sample of the data, or of a representative part of the samples."""
    tokens_per_step: int
    """Tokens of an iteration on all pipelines together."""
    options: CandidateOptions

    def solve(self) -> CandidatePlans | PlanningError:
        """Return the candidate plans, or the error if there are none."""
        try:
            return propose_plans(
                self.lengths,
                self.typical.basis.cost(),
                tokens_per_step=self.tokens_per_step,
                options=self.options,
                given=self._static_plans(),
            )
        except PlanningError as error:
            return error

    def _static_plans(self) -> tuple[ParallelPlan, ...]:
        found = self.typical.solve()
        if isinstance(found, PlanningError):
            return ()
        working = tuple(
            replace(pipeline, num_microbatches=None)
            for pipeline in found.best.plan.pipelines
            if pipeline.num_microbatches != 0
        )
        return (ParallelPlan(pipelines=working),)


def serve() -> None:
    """Answer tasks at low priority: what an `AnsweringProcess` of this module runs."""
    os.nice(_NICENESS)

    def solve(task: Task[object]) -> object:
        return task.solve()

    answer_questions(solve)
