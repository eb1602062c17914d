"""Modules that read what lies outside their layers early, late, seldom, or without gradients."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.core.errors import HeteroError
from tests.toy import quiet

WIDTH, SIZE, NUM_ROWS = 8, 11, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) + shift


class OuterModule(L.LightningModule):
    """Embeds, runs layers, and does what its kind says with outer parameters."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(SIZE, WIDTH)
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.heads = nn.ModuleList([nn.Linear(WIDTH, SIZE) for _ in range(2)])
        self.losses: list[float] = []

    def forward(self, ids: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(ids)
        keep = (self.embed.weight.detach()[ids].mean(-1, keepdim=True) > 0).float()
        shift = self.shift if self.kind == "read in layers" else torch.zeros(())
        if self.kind == "looked at" and bool(self.embed.weight.detach().mean() > -9):
            shift = torch.ones(())
        for layer in self.layers:
            x = layer(x, shift)
        if self.kind == "mask made early":
            x = x * keep
        logits: Tensor = self.heads[batch_idx % 2 if self.kind == "heads by batch" else 0](x)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch
        loss = F.cross_entropy(self(ids, batch_idx).flatten(0, 1), ids.flatten())
        if self.kind == "loss from the second epoch" and self.current_epoch:
            loss = loss + self.embed.weight.square().mean()
        if self.kind == "loss from the second step" and self.global_step:
            loss = loss + self.embed.weight.square().mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        (ids,) = batch
        logits = self(ids, batch_idx)
        self.log("loss", F.cross_entropy(logits.flatten(0, 1), ids.flatten()))
        if self.kind == "decoded in validation":
            found = logits.softmax(-1) @ self.embed.weight @ self.embed.weight.T
            self.log("decoded", F.cross_entropy(found.flatten(0, 1), ids.flatten()))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0], batch_idx)
        if self.kind == "decoded in prediction":
            return logits.softmax(-1) @ self.embed.weight
        return logits

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run_kinds(
    rank: int,
    kinds: list[str],
    plan: dict[str, Any] | None,
    fits: bool,  # noqa: FBT001
) -> dict[str, Any]:
    """Return of each kind its losses, metrics and predictions, or why it was refused."""
    return {kind: _run(kind, plan, fits=fits) for kind in kinds}


def _run(kind: str, plan: dict[str, Any] | None, *, fits: bool) -> Any:
    L.seed_everything(3, verbose=False)
    module = OuterModule(kind)
    data = TensorDataset(torch.randint(SIZE, (NUM_ROWS, 5)))
    loader = DataLoader(data, batch_size=4)
    options: dict[str, Any] = {"devices": 1}
    if plan is not None:
        parsed = ParallelPlan.from_dict(plan)
        strategy = HeteroStrategy(parsed, num_microbatches=2, layers="layers")
        options = {"strategy": strategy, "devices": len(parsed.ranks)}
    trainer = L.Trainer(**quiet(max_epochs=2, num_sanity_val_steps=0), **options)
    try:
        if fits:
            trainer.fit(module, loader, loader)
        else:
            trainer.validate(module, loader, verbose=False)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        predictions = trainer.predict(module, loader)
    except HeteroError as error:
        return f"{type(error).__name__}: {error}"
    shared = torch.cat([item for item in predictions if item is not None])
    return {"losses": module.losses, **metrics, "mean": float(shared.square().mean())}
