"""Assign variable-length sequences in two stages, and propose plans for the data (Hydraulis §6-7).

Read in this order: `cost` (what a sequence costs), `dispatch` (which pipeline gets it), `pack`
(which micro-batch), `iteration` (the best candidate plan), `proposal` (where candidates come from).
"""

from lightning_hetero.assign.bounds import dispatch_lower_bound_s
from lightning_hetero.assign.coefficients import (
    ModelMemory,
    StageMemory,
    max_len,
    pipeline_cost,
    util_len,
)
from lightning_hetero.assign.cost import PipelineCost
from lightning_hetero.assign.dispatch import Dispatch, dispatch
from lightning_hetero.assign.exact import dispatch_exact
from lightning_hetero.assign.iteration import assign_iteration
from lightning_hetero.assign.pack import Packing, pack, pack_all
from lightning_hetero.assign.plan_bound import plan_lower_bound_s, work_lower_bound_s
from lightning_hetero.assign.plan_cost import plan_costs
from lightning_hetero.assign.proposal import (
    Proposal,
    ProposalOptions,
    Scheme,
    draw_iteration,
    propose,
)

__all__ = [
    "Dispatch",
    "ModelMemory",
    "Packing",
    "PipelineCost",
    "Proposal",
    "ProposalOptions",
    "Scheme",
    "StageMemory",
    "assign_iteration",
    "dispatch",
    "dispatch_exact",
    "dispatch_lower_bound_s",
    "draw_iteration",
    "max_len",
    "pack",
    "pack_all",
    "pipeline_cost",
    "plan_costs",
    "plan_lower_bound_s",
    "propose",
    "util_len",
    "work_lower_bound_s",
]
