"""Searches that can be done elsewhere: by a process, before anybody has to wait for the answer.

What a search depends on is data, and the same data give the same plans. So what will have to be
planned if a rank is lost can be solved while all train, by a process that gives way to them.
"""

import os
from dataclasses import dataclass

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.process.answering import answer_questions
from lightning_hetero.core.profile import Profile
from lightning_hetero.planner.result import PlanningResult
from lightning_hetero.planner.search import plan
from lightning_hetero.planner.workload import PlanningOptions, Workload
from lightning_hetero.simulator import StateLayout, choose_cost

__all__ = ["PlanningTask", "serve"]

_NICENESS = 15


@dataclass(frozen=True, kw_only=True)
class PlanningTask:
    """All that a search depends on."""

    cluster: Cluster
    model: ModelSpec
    states: StateLayout
    workload: Workload
    profile: Profile | None
    """Measured costs; None where data sheets serve."""
    options: PlanningOptions

    def solve(self) -> PlanningResult | PlanningError:
        """Return the best plans, or why there are none."""
        cost = choose_cost(self.cluster, self.model, self.profile, layout=self.states)
        try:
            return plan(self.cluster, self.model, self.workload, self.options, cost=cost)
        except PlanningError as error:
            return error


def serve() -> None:
    """Solve tasks, as an `AnsweringProcess` does."""
    os.nice(_NICENESS)
    answer_questions(PlanningTask.solve)
