"""Decide which device runs which layers: grouping, mapping, balancing and search (AutoHet §III)."""

from lightning_hetero.planner.balancing import balance_layers
from lightning_hetero.planner.candidates import CandidateOptions, CandidatePlans, propose_plans
from lightning_hetero.planner.grouping import Grouping, effective_power, group_devices
from lightning_hetero.planner.mapping import Group, MappingOrder, map_groups
from lightning_hetero.planner.search import PlannedCandidate, PlanningResult, plan
from lightning_hetero.planner.workload import Objective, PlanningOptions, Workload

__all__ = [
    "CandidateOptions",
    "CandidatePlans",
    "Group",
    "Grouping",
    "MappingOrder",
    "Objective",
    "PlannedCandidate",
    "PlanningOptions",
    "PlanningResult",
    "Workload",
    "balance_layers",
    "effective_power",
    "group_devices",
    "map_groups",
    "plan",
    "propose_plans",
]
