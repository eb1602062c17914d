"""Gradients of many micro-batches are summed as exactly as fp32 sums them."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_hetero import HeteroStrategy, ParallelPlan
from tests.fits import SEED
from tests.toy import quiet

WIDTH = 16


class Tower(L.LightningModule):
    """Two layers whose rows all count alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.found: Tensor = torch.empty(0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = batch.to(self.layers[0].weight.dtype)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return F.mse_loss(hidden.float(), torch.ones(hidden.shape))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad.float().reshape(-1) for p in self.parameters() if p.grad is not None]
        self.found = torch.cat(gradients) if gradients else self.found


def rows(num_rows: int) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(SEED))


def gradient_of_an_iteration(rank: int, num_microbatches: int, **options: Any) -> Tensor:
    """Return the gradient of so many rows, a row a micro-batch, propagated in bf16 on one rank."""
    L.seed_everything(SEED, verbose=False)
    module = Tower()
    plan = ParallelPlan.even(world_size=1, num_layers=2, num_stages=1)
    strategy = HeteroStrategy(plan, num_microbatches=num_microbatches, **options)
    trainer = L.Trainer(**quiet(max_steps=1, precision="bf16-mixed"), strategy=strategy, devices=1)
    trainer.fit(module, DataLoader(rows(num_microbatches), batch_size=num_microbatches))
    return module.found


def gradient_of_rows(num_rows: int, dtype: torch.dtype) -> Tensor:
    """Return the sum, in fp64, of the rows' gradients that are propagated in `dtype`."""
    L.seed_everything(SEED, verbose=False)
    module = Tower().to(dtype)
    total = torch.zeros(())
    for row in rows(num_rows):
        loss = module.training_step(row[None], 0)
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        total = total + torch.cat([item.double().reshape(-1) for item in gradients])
    return total / num_rows


def test_gradients_of_bf16_are_summed_in_fp32() -> None:
    num_microbatches = 128
    exact = gradient_of_rows(num_microbatches, torch.float32)
    summed = gradient_of_rows(num_microbatches, torch.bfloat16)

    def error(gradient: torch.Tensor) -> float:
        return float((gradient - exact).norm() / exact.norm())

    assert error(gradient_of_an_iteration(0, num_microbatches)) <= 1.01 * error(summed) < 2e-3
    rounded = gradient_of_an_iteration(0, num_microbatches, fp32_gradients=False)
    assert error(rounded) > 4 * error(summed), "the option has its price"
