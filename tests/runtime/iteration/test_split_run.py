"""What the check of a loss costs, and when it runs."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroStrategy
from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.setup.products import SavedBytes
from tests.toy import quiet

STEPS: list[tuple[int, int]] = []
"""Samples of each call of the step, and the bytes that autograd saved in it."""
GRADIENTS: list[int] = []
"""Samples of each backward that has reached the first layer's output."""


class Counted(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        with SavedBytes(without=self.parameters()) as saved:
            hidden = torch.tanh(self.layers[0](x))
            hidden.register_hook(lambda gradient: GRADIENTS.append(len(gradient)))
            for layer in self.layers[1:]:
                hidden = torch.tanh(layer(hidden))
            loss = F.mse_loss(hidden, x)
        STEPS.append((len(x), saved.total))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_check_costs_less_than_three_steps_and_no_more_memory_than_one() -> None:
    num_samples = 3
    loader = DataLoader(TensorDataset(torch.randn(2 * num_samples, 8)), batch_size=2 * num_samples)
    trainer = L.Trainer(
        **quiet(max_steps=1), devices=1, strategy=HeteroStrategy(num_microbatches=2)
    )
    trainer.fit(Counted(), loader)
    *checked, first, second = STEPS
    assert first == second
    assert first[0] == num_samples
    assert sum(samples for samples, _ in checked) <= 3 * num_samples, "a step has two micro-batches"
    assert max(num_bytes for _, num_bytes in checked) <= first[1]
    assert [num_samples] * 2 == GRADIENTS, "a check goes back through the last layer only"


class OfChosen(Counted):
    """A mean over what its batch says: as many in each sample of the first micro-batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, count = batch
        loss: Tensor = self.layers[-1](x).square().sum(1) * count.pow(2)
        return loss.sum() / count.pow(2).sum()


def test_each_check_takes_another_micro_batch() -> None:
    count = torch.tensor([1.0, 1.0, 1.0, 2.0, 3.0, 1.0] * 2)
    loader = DataLoader(TensorDataset(torch.randn(12, 8), count), batch_size=6)
    strategy = HeteroStrategy(num_microbatches=2)
    trainer = L.Trainer(**quiet(max_steps=2), devices=1, strategy=strategy)
    with pytest.raises(StepError, match="num_target_tokens"):
        trainer.fit(OfChosen(), loader)
    assert trainer.global_step == 1


class Masked(L.LightningModule):
    """A mean over what a mask chooses: nothing in the first iterations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, mask = batch
        return (self.layers[0](x).square().sum(1) * mask).sum() / mask.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:Gradients of batch")
def test_a_check_that_sees_nothing_runs_again() -> None:
    mask = torch.tensor([0.0] * 24 + [1.0, 1.0, 1.0, 0.0] * 2)
    loader = DataLoader(TensorDataset(torch.randn(32, 8), mask), batch_size=8)
    strategy = HeteroStrategy(num_microbatches=2, nonfinite_gradients="skip")
    trainer = L.Trainer(**quiet(max_steps=4), devices=1, strategy=strategy)
    with pytest.warns(UserWarning, match="a mean over the sum of tensor 1.*Until now"):
        trainer.fit(Masked(), loader)
