"""Searches that can be done elsewhere: by a process, before anybody has to wait for the answer.

What a search depends on is data, and the same data give the same plans. So what will have to be
planned if a rank is lost can be solved while all train, by a process that gives way to them.
"""

import os
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.process.answering import answer_questions
from lightning_hetero.core.profile import Profile
from lightning_hetero.planner.proposing.candidate_plans import (
    CandidateOptions,
    CandidatePlans,
    propose_plans,
)
from lightning_hetero.planner.result import PlanningResult
from lightning_hetero.planner.search import plan
from lightning_hetero.planner.workload import PlanningOptions, Workload
from lightning_hetero.simulator import CostModel, StateLayout, choose_cost

__all__ = ["PlanBasis", "PlanningTask", "ProposalTask", "Task", "serve"]

_NICENESS = 15
_Answer_co = TypeVar("_Answer_co", covariant=True)


class Task(Protocol[_Answer_co]):
    """Something to be solved elsewhere: equal tasks have equal answers."""

    def solve(self) -> _Answer_co:
        """Return the answer."""


@dataclass(frozen=True, kw_only=True)
class PlanBasis:
    """The basis of a plan's prediction, so that others can be predicted beside it."""

    cluster: Cluster
    model: ModelSpec
    states: StateLayout
    workload: Workload
    profile: Profile | None
    """Measured costs; None where data sheets serve."""

    def cost(self) -> CostModel:
        """Return the cost model by which plans are judged."""
        return choose_cost(self.cluster, self.model, self.profile, layout=self.states)


@dataclass(frozen=True, kw_only=True)
class PlanningTask:
    """All that a search depends on."""

    basis: PlanBasis
    options: PlanningOptions

    def solve(self) -> PlanningResult | PlanningError:
        """Return the best plans, or why there are none."""
        basis, cost = self.basis, self.basis.cost()
        try:
            return plan(basis.cluster, basis.model, basis.workload, self.options, cost=cost)
        except PlanningError as error:
            return error


@dataclass(frozen=True, kw_only=True)
class ProposalTask:
    """All that plans for samples of different lengths depend on (Hydraulis §7)."""

    typical: PlanningTask
    """The search for samples of one typical length, whose best plan is tried, too."""
    lengths: tuple[int, ...]
    """Tokens of the samples, or of a fair part of them."""
    tokens_per_step: int
    """Tokens of an iteration on all pipelines together."""
    options: CandidateOptions

    def solve(self) -> CandidatePlans | PlanningError:
        """Return the candidate plans, or why there are none."""
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
    """Solve tasks, as an `AnsweringProcess` does."""
    os.nice(_NICENESS)

    def solve(task: Task[object]) -> object:
        return task.solve()

    answer_questions(solve)
