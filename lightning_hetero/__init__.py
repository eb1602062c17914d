"""Train one transformer across unequal GPUs inside PyTorch Lightning."""

from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
from lightning_hetero.strategy import HeteroStrategy

__all__ = ["HeteroStrategy", "ParallelPlan", "PipelinePlan", "StagePlan"]
