"""Gradients of many micro-batches are summed as exactly as fp32 sums them."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fits import SEED, Case, train
from tests.plans import pipeline, plan_of, stage
from tests.toy import Compared

WIDTH = 16
NUM_ROWS = 128


class Tower(Compared):
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

    def rows(self, num_empty: int) -> Any:
        return rows(NUM_ROWS)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad.float().reshape(-1) for p in self.parameters() if p.grad is not None]
        self.found = torch.cat(gradients) if gradients else self.found


def rows(num_rows: int) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(SEED))


def gradient_of_an_iteration(num_microbatches: int, **options: Any) -> Tensor:
    """Return the gradient of so many rows, a row a micro-batch, propagated in bf16 on one rank."""
    plan = plan_of(pipeline(stage(0, 0, 2)))
    how = {"num_microbatches": num_microbatches, "precision": "bf16-mixed", "options": options}
    found: Tensor = train(Case(model=Tower, plan=plan, batch_size=num_microbatches, **how)).found
    return found


def gradient_of_rows(dtype: torch.dtype) -> Tensor:
    """Return the sum, in fp64, of the rows' gradients that are propagated in `dtype`."""
    L.seed_everything(SEED, verbose=False)
    module = Tower().to(dtype)
    total = torch.zeros(())
    for row in rows(NUM_ROWS):
        loss = module.training_step(row[None], 0)
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        total = total + torch.cat([item.double().reshape(-1) for item in gradients])
    return total / NUM_ROWS


def test_gradients_of_bf16_are_summed_in_fp32() -> None:
    exact, summed = (gradient_of_rows(dtype) for dtype in (torch.float32, torch.bfloat16))

    def error(gradient: torch.Tensor) -> float:
        return float((gradient - exact).norm() / exact.norm())

    assert error(gradient_of_an_iteration(NUM_ROWS)) <= 1.01 * error(summed) < 2e-3
    rounded = gradient_of_an_iteration(NUM_ROWS, fp32_gradients=False)
    assert error(rounded) > 4 * error(summed), "the option has its price"
