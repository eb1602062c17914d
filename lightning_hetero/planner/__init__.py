"""Decide which device runs which layers: grouping, mapping, balancing and search (AutoHet §III)."""

from lightning_hetero.planner.microbatch_size import plan_best_size
from lightning_hetero.planner.proposing.candidate_plans import (
    CandidateOptions,
    CandidatePlans,
    propose_plans,
)
from lightning_hetero.planner.proposing.pipeline_costs import plan_costs
from lightning_hetero.planner.result import PlannedCandidate, PlanningResult
from lightning_hetero.planner.search import plan
from lightning_hetero.planner.workload import Objective, PlanningOptions, Workload

__all__ = [
    "CandidateOptions",
    "CandidatePlans",
    "Objective",
    "PlannedCandidate",
    "PlanningOptions",
    "PlanningResult",
    "Workload",
    "plan",
    "plan_best_size",
    "plan_costs",
    "propose_plans",
]
