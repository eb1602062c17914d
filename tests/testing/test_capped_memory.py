"""A rank that plays a small device runs out of its memory, and only then."""

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.capped_memory import CappedMemory, MemoryCounter
from tests.toy import quiet


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(100, 100, bias=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(capped: CappedMemory) -> None:
    loader = DataLoader(TensorDataset(torch.ones(100, 100)), batch_size=50)
    L.Trainer(**quiet(max_epochs=1, callbacks=[capped])).fit(Net(), loader)


def test_storages_count_once_from_their_making_until_they_go() -> None:
    with MemoryCounter(2**40) as counter:
        before = counter.live_bytes
        weight = torch.zeros(100, 100, requires_grad=True)
        rows = torch.ones(50, 100)
        view = rows[:10]
        assert counter.live_bytes - before == 60_000
        kept = nn.functional.linear(rows, weight).relu().sum()
        assert counter.live_bytes - before == 60_000 + 20_000 + 4, "the result of relu is saved"
        del rows
        kept.backward()
        del kept
        assert counter.live_bytes - before == 20_000 + 2 * 40_000, "a view keeps, and a gradient"
        del view
        assert counter.live_bytes - before == 2 * 40_000


def test_the_allocation_over_the_cap_fails() -> None:
    free = CappedMemory((2**40,))
    fit(free)
    assert free.peak_bytes > 2 * 40_000 + 2 * 20_000
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        fit(CappedMemory((100_000,)))
    assert torch.zeros(100_000).numel() == 100_000, "the cap ends with the run"
