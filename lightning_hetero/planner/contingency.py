"""Searches that can be done elsewhere: by a process, before anybody has to wait for the answer.

What a search depends on is data, and the same data give the same plans. So what will have to be
planned if a rank is lost can be solved while all train, by a process that imports neither torch nor
Lightning and gives way to the training.
"""

import os
import pickle
import sys
from dataclasses import dataclass

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.profile import Profile
from lightning_hetero.planner.result import PlanningResult
from lightning_hetero.planner.search import plan
from lightning_hetero.planner.workload import PlanningOptions, Workload
from lightning_hetero.simulator import CostModel, ProfileCost, RooflineCost, StateLayout

__all__ = ["PlanningTask", "cost_of", "serve"]

_NICENESS = 15


def cost_of(
    cluster: Cluster, model: ModelSpec, states: StateLayout, profile: Profile | None
) -> CostModel:
    """Return the costs of a measured profile, or of data sheets without one."""
    if profile is None:
        return RooflineCost(cluster, model, layout=states)
    return ProfileCost(cluster, model, profile, layout=states)


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
        cost = cost_of(self.cluster, self.model, self.states, self.profile)
        try:
            return plan(self.cluster, self.model, self.workload, self.options, cost=cost)
        except PlanningError as error:
            return error


def serve() -> None:
    """Solve tasks from standard input until it ends, as it does when the process that asks dies."""
    os.nice(_NICENESS)
    tasks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Whatever prints must not come between the answers.
    while True:
        try:
            task: PlanningTask = pickle.load(tasks)
        except EOFError:
            return
        pickle.dump(task.solve(), answers)
        answers.flush()
