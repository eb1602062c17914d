"""Modules whose lists of layers are no chain, trained under a plan or on a single device."""

from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_hetero import HeteroStrategy, ParallelPlan
from tests.runtime.runs import SEED
from tests.toy import quiet

WIDTH = 6


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Free(L.LightningModule):
    """A trunk of several blocks, called in ways that no pipeline could carry."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList([self._block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 2)
        self.losses: list[float] = []

    def _block(self) -> nn.Module:
        if self.kind == "nested":
            return nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)])
        return Residual()

    def order(self, batch_idx: int) -> Iterable[int]:
        orders: dict[str, Iterable[int]] = {
            "reused": (0, 1, 2) * 2,
            "each twice": (0, 0, 1, 1, 2, 2),
            "chosen": (batch_idx % 3,),
            "first dropped": range(batch_idx % 2, 3),
            "last dropped": range(3 - batch_idx % 2),
            "none": (),
        }
        return orders.get(self.kind, range(3))

    def forward(self, x: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(x)
        for index in self.order(batch_idx):
            block = self.blocks[index]
            if self.kind == "nested":
                x = x + block[1](torch.tanh(block[0](x)))
            elif self.kind == "by hand":
                x = x + torch.tanh(F.linear(x, block.linear.weight, block.linear.bias))
            else:
                x = block(x)
        out: Tensor = self.head(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        passes = 2 if self.kind == "two passes" else 1
        logits = sum(self(x + index, batch_idx) for index in range(passes))
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(SEED)
        x = torch.randn(24, 4, generator=generator)
        y = torch.randint(2, (24,), generator=generator)
        y[::5] = -100  # So that micro-batches weigh differently.
        rows = list(zip(x, y, strict=True))
        return DataLoader(rows, batch_size=self.batch_size)

    batch_size = 4


KINDS = (
    "reused",
    "each twice",
    "chosen",
    "first dropped",
    "last dropped",
    "none",
    "nested",
    "by hand",
    "two passes",
)


def train_free(
    rank: int, kinds: tuple[str, ...], plan: dict[str, Any] | None, num_microbatches: int = 1
) -> dict[str, Any]:
    """Return each kind's losses and weights, or what refused it."""
    return {kind: _train(kind, plan, num_microbatches) for kind in kinds}


def _train(kind: str, plan: dict[str, Any] | None, num_microbatches: int) -> Any:
    L.seed_everything(SEED, verbose=False)
    module = Free(kind)
    strategy: dict[str, Any] = {"devices": 1}
    if plan is None:
        module.batch_size *= 2
    else:
        made = ParallelPlan.from_dict(plan)
        hetero = HeteroStrategy(
            made, layers="blocks", num_microbatches=num_microbatches, whole_after_run=True
        )
        strategy = {"strategy": hetero, "devices": 2}
    trainer = L.Trainer(**quiet(max_epochs=1), **strategy)
    trainer.fit(module)
    weights = {name: value.detach().numpy() for name, value in module.state_dict().items()}
    return module.losses, weights


def refuse_free(rank: int, kind: str, plan: dict[str, Any]) -> tuple[str, str, int]:
    """Return what refuses a kind, and after how many steps."""
    module = Free(kind)
    hetero = HeteroStrategy(ParallelPlan.from_dict(plan), layers="blocks", num_microbatches=2)
    trainer = L.Trainer(**quiet(max_epochs=1), strategy=hetero, devices=2)
    try:
        trainer.fit(module)
    except Exception as error:
        return type(error).__name__, str(error), trainer.global_step
    return "", "trained", trainer.global_step
