"""Runs of modules whose layers keep counts and statistics in buffers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.core.errors import StepError
from tests.runtime.runs import pipeline, plan_of, stage
from tests.toy import quiet

WIDTH = 6


@dataclass(frozen=True, kw_only=True)
class BufferCase:
    """What layers keep, and the plans that run them one after the other."""

    keeps: str
    """"counts", "unversioned" counts, a running "mean", or "norms": BatchNorm.

    Without a place in the state: "scratch counts", "frequencies" of each micro-batch's first value,
    and a "cache" that grows and is filled again with what it holds.
    """
    plans: tuple[dict[str, Any], ...] = ()
    allow_mixing: bool = False


class Layer(nn.Module):
    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if keeps == "norms" else nn.Identity()
        self.keeps = keeps
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scratch", torch.zeros(()), persistent=False)
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.keeps == "counts":
            self.count = self.count + 1
        if self.training and self.keeps == "unversioned":
            self.count.data.add_(1)
        if self.training and self.keeps == "mean":
            self.mean.lerp_(x.detach().mean(0), 0.2)
        if self.training and self.keeps == "scratch counts":
            self.scratch += 1
        if self.training and self.keeps == "frequencies":
            self.scratch.copy_(x.detach()[0, 0])
        if self.keeps == "cache":
            self.scratch.copy_(torch.ones(()))
            if len(self.table) < 3 * len(x):
                self.table = torch.ones(len(self.table) + 1)
        x = x + self.scratch
        # What is evaluated depends on the buffers.
        return torch.tanh(self.norm(self.linear(x))) + 0.1 * self.count + self.mean


class Keeps(L.LightningModule):
    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(keeps) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("drawn", torch.rand(WIDTH), persistent=keeps != "cache")
        self.losses: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = x + self.drawn
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.head(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.layers[0].keeps == "counts":
            self.steps += 1  # On last stages only.
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Changes(L.Callback):
    def __init__(self, plans: tuple[dict[str, Any], ...]) -> None:
        self.plans = [ParallelPlan.from_dict(plan) for plan in plans]

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if len(self.plans) > 1:
            plan = self.plans[trainer.global_step % len(self.plans)]
            trainer.strategy.change_plan(plan)  # type: ignore[attr-defined]


def keep(rank: int, case: BufferCase, folder: Path) -> dict[str, Any] | str:
    """Fit and validate; returns losses and buffers, or the refusal."""
    torch.manual_seed(0)
    module, plans = Keeps(case.keeps), case.plans
    with torch.no_grad():
        module.drawn += rank  # Rank 0's is what counts.
    options: dict[str, Any] = {"devices": 1}
    num_batches = 1
    if plans:
        num_batches = len(plans[0]["pipelines"])
        strategy = HeteroStrategy(ParallelPlan.from_dict(plans[0]), allow_mixing=case.allow_mixing)
        options = {"devices": 2, "strategy": strategy, "callbacks": [Changes(plans)]}
    generator = torch.Generator().manual_seed(1)
    rows = TensorDataset(
        torch.randn(32, WIDTH, generator=generator), torch.randn(32, 1, generator=generator)
    )
    train, valid = DataLoader(rows, batch_size=8 // num_batches), DataLoader(rows, batch_size=32)
    trainer = L.Trainer(**quiet(max_epochs=1, num_sanity_val_steps=0, **options))
    try:
        trainer.fit(module, train, valid)
    except StepError as error:
        return str(error)
    path = folder / f"{len(plans)}.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["state_dict"]
    buffers = {
        name: value.tolist() for name, value in module.named_buffers() if "table" not in name
    }
    return {
        "losses": module.losses,
        "validated": float(trainer.callback_metrics["val_loss"]),
        "buffers": buffers,
        "saved": {name: saved[name].tolist() for name in buffers if name in saved},
    }


TWO = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 3), num_microbatches=2))
TWO_OF_ONE = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 3), num_microbatches=1))
TURNED = plan_of(pipeline(stage(1, 0, 2), stage(0, 2, 3), num_microbatches=1))
COPIES = plan_of(
    pipeline(stage(0, 0, 3), num_microbatches=1), pipeline(stage(1, 0, 3), num_microbatches=1)
)
