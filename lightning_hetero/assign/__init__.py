"""Assign variable-length sequences to pipelines and micro-batches (Hydraulis §6).

Read in this order: `pipeline_cost` (what a sequence costs), `dispatch` (which pipeline gets it),
`iteration` (in which micro-batch, under the best candidate plan). The planner makes the candidate
plans: `lightning_hetero.planner.proposing`.
"""

from lightning_hetero.assign.dispatch import Dispatch, dispatch
from lightning_hetero.assign.iteration import Packing, assign_iteration, pack
from lightning_hetero.assign.pipeline_cost import PipelineCost

__all__ = ["Dispatch", "Packing", "PipelineCost", "assign_iteration", "dispatch", "pack"]
