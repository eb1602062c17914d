"""Modules whose layers hand on more than one shape, and runs of them that tests compare."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroStrategy, ParallelPlan
from tests.toy import quiet

WIDTH = 8
NUM_TOKENS = 8
BATCH = 4
NUM_STEPS = 3


class Layer(nn.Module):
    """Changes width, tokens or dtype of the hidden state, as its kind says."""

    def __init__(self, kind: str, index: int) -> None:
        super().__init__()
        widths = [WIDTH, 12, 4, WIDTH] if kind == "width" else [WIDTH] * 4
        self.linear = nn.Linear(widths[index], widths[index + 1])
        self.kind, self.index = kind, index

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if self.kind == "pool":
            # Half the tokens behind the first layer, and all of them again behind the second.
            return [y[:, ::2], y.repeat_interleave(2, 1), y][self.index]
        if self.kind == "ragged":
            # The data say how many tokens go on.
            return y[:, : 2 + int((x[0].detach().sum(-1) > 0).sum())]
        if self.kind == "dtype":
            return y.bfloat16() if self.index == 0 else y
        return y


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList([Layer(kind, index) for index in range(3)])
        self.head = nn.Linear(WIDTH, 1)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.kind == "dtype"):
            x = self.embed(x).float()
            for layer in self.layers:
                x = layer(x)
        return self.head(x.float()).mean(1)


class Module(L.LightningModule):
    """A regression; losses of steps and the validation's loss are what runs compare."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.losses: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(BATCH * NUM_STEPS, NUM_TOKENS, 3, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(-1)[:, :1]), batch_size=batch_size)


def fit(module: L.LightningModule, plan: dict[str, Any] | None, batch_size: int = BATCH) -> None:
    """Train and validate, under a plan or on a single device that sees its micro-batches."""
    options: dict[str, Any] = {"devices": 1, "accumulate_grad_batches": BATCH // batch_size}
    if plan is not None:
        found = ParallelPlan.from_dict(plan)
        strategy = HeteroStrategy(found, num_microbatches=2, layers="net.layers")
        options = {"strategy": strategy, "devices": max(found.ranks) + 1}
    trainer = L.Trainer(
        **quiet(max_epochs=1, num_sanity_val_steps=0), **options, use_distributed_sampler=False
    )
    trainer.fit(module, loader(batch_size), loader(batch_size))


def result(module: Module) -> list[float]:
    """Return losses, the validation's last, and a sum over each parameter."""
    sums = [float(value.double().abs().sum()) for value in module.state_dict().values()]
    return [*module.losses, float(module.trainer.callback_metrics["val"]), *sums]


def train_shapes(
    rank: int, kinds: list[str], plan: dict[str, Any] | None
) -> dict[str, list[float]]:
    results = {}
    for kind in kinds:
        L.seed_everything(5, verbose=False)
        module = Module(Net(kind))
        fit(module, plan)
        results[kind] = result(module)
    return results
