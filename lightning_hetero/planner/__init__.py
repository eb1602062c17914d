"""Decide which device runs which layers: grouping, mapping, balancing and search (AutoHet §III)."""

from lightning_hetero.planner.arrangement import Group, MappingOrder, map_groups
from lightning_hetero.planner.microbatch_size import plan_best_size
from lightning_hetero.planner.proposing.candidate_plans import (
    CandidateOptions,
    CandidatePlans,
    propose_plans,
)
from lightning_hetero.planner.proposing.pipeline_costs import plan_costs
from lightning_hetero.planner.proposing.proposal import (
    Proposal,
    ProposalOptions,
    Scheme,
    draw_iteration,
    propose,
)
from lightning_hetero.planner.proposing.work_bound import work_lower_bound_s
from lightning_hetero.planner.result import PlannedCandidate, PlanningResult
from lightning_hetero.planner.search import plan
from lightning_hetero.planner.solvers.balancing import balance_layers
from lightning_hetero.planner.workload import Objective, PlanningOptions, Workload

__all__ = [
    "CandidateOptions",
    "CandidatePlans",
    "Group",
    "MappingOrder",
    "Objective",
    "PlannedCandidate",
    "PlanningOptions",
    "PlanningResult",
    "Proposal",
    "ProposalOptions",
    "Scheme",
    "Workload",
    "balance_layers",
    "draw_iteration",
    "map_groups",
    "plan",
    "plan_best_size",
    "plan_costs",
    "propose",
    "propose_plans",
    "work_lower_bound_s",
]
