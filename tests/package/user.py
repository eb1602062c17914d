"""A user's script, which `mypy --strict` accepts as it stands, with the wheel installed.

An ignore that isn't needed is an error, so each one here is a mistake that mypy must find.
"""

from datetime import timedelta
from typing import assert_type

import lightning as L
import torch
from torch import nn

from lightning_hetero import (
    AutoPlan,
    CollectGarbage,
    ElasticRestart,
    HeteroDataModule,
    HeteroStrategy,
    LayerwiseCheckpoint,
    ParallelPlan,
    PipelinePlan,
    RunLog,
    RunMetrics,
    StagePlan,
    StragglerMonitor,
    TraceOperations,
    TwoStageBatchSampler,
    own_rows,
)
from lightning_hetero.checkpoint import AwsSpotNotice
from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.errors import HeteroError, PlanError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.models import PackedBatch, pack_samples, packed_cross_entropy
from lightning_hetero.planner import PlanningResult, Workload
from lightning_hetero.planner import plan as find_plan


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def training_step(self, batch: PackedBatch) -> torch.Tensor:
        x = self.embed(batch.input_ids)
        for block in self.blocks:
            x = block(x)
        return packed_cross_entropy(x @ self.embed.weight.T, batch.labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def on_train_batch_end(self, *_: object) -> None:
        for parameter in self.parameters():
            assert_type(own_rows(parameter), torch.Tensor)


def train() -> None:
    stage = StagePlan(ranks=(0,), layers=range(4))
    plan = ParallelPlan(pipelines=(PipelinePlan(stages=(stage,)),))
    assert_type(ParallelPlan.load("plan.json"), ParallelPlan)
    strategy = HeteroStrategy(
        plan,
        schedule="auto",
        ownership="even",
        exchange="by-node",
        activation_checkpointing="full",
        timeout=timedelta(minutes=1),
    )
    callbacks: list[L.Callback] = [
        LayerwiseCheckpoint("s3://bucket/run", local_dir="/nvme/run", replicas=2),
        ElasticRestart(AwsSpotNotice(), in_place=True),
        StragglerMonitor(dry_run=True),
        TraceOperations(every_n_steps=100),
        RunLog(),
        RunMetrics(),
        CollectGarbage(),
    ]
    samples = [torch.arange(8), torch.arange(5)]
    data = HeteroDataModule(samples, tokens_per_step=64, context_length=32)
    L.Trainer(strategy=strategy, callbacks=callbacks).fit(Model(), data)
    assert_type(strategy.plan, ParallelPlan)
    try:
        assert_type(strategy.change_plan(plan), int)
    except PlanError as error:
        failed: HeteroError = error
        raise SystemExit(str(failed)) from None


def plan_ahead() -> PlanningResult:
    workload = Workload(sequence_length=4096, global_batch_size=256)
    return find_plan(Cluster.load("cluster.yaml"), ModelSpec.load("llama-13b"), workload)


assert_type(pack_samples([[1, 2], [3]]), PackedBatch)
TwoStageBatchSampler([5, 3, 8], tokens_per_step=8)
HeteroStrategy(AutoPlan())
HeteroStrategy(schedule="1f2b")  # type: ignore[arg-type]
HeteroStrategy(num_stage=2)  # type: ignore[call-arg]
ParallelPlan(pipelines=2)  # type: ignore[arg-type]
