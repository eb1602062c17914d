"""Runs with `LayerwiseCheckpoint` that tests compare: under any plan, or on a single device."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor
from torch.optim.swa_utils import get_ema_avg_fn
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.callbacks import LayerwiseCheckpoint
from lightning_hetero.models import (
    HeteroLM,
    LMConfig,
    PackedBatch,
    pack_samples,
    packed_cross_entropy,
)
from tests.data.rows import VOCABULARY, Rows, lengths_of
from tests.toy import ADAM_EPS, TokenRows, ToyModule, ToyOptions, quiet

# Two iterations an epoch; inside one torchdata finds its place only with the sampler that saved.
LENGTHS = lengths_of(12)


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One part of a run: under which plan, until which step."""

    until: int
    plan: dict[str, Any] | None = None
    """None runs on a single device without our strategy."""
    world_size: int = 1
    ownership: str = "auto"
    redundancy: int = 0


class PackedModule(L.LightningModule):
    """The reference model on packed batches."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        sizes = LMConfig(vocab_size=VOCABULARY, hidden_size=16, num_layers=3, num_heads=2)
        self.model = HeteroLM(sizes)
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))
        self.losses: list[float] = []
        self.num_owned = 0

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        logits = self.model(batch.input_ids, batch.cu_seqlens, batch.position_ids, batch.max_seqlen)
        return packed_cross_entropy(logits, batch.labels)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        # Hooks are told counts of the whole.
        with torch._C.DisableTorchFunction():
            self.num_owned = sum(p.numel() for p in self.parameters())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.num_steps += 1

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.ndim >= 2]
        rest = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=ADAM_EPS)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=8)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fit(
    rank: int, leg: Leg, folder: str | None = None, ckpt_path: str | None = None
) -> dict[str, Any]:
    """Train until the leg's end; go on from the folder's newest checkpoint, or from a file."""
    torch.manual_seed(0)
    average = WeightAveraging(use_buffers=False, avg_fn=get_ema_avg_fn(0.8))
    callbacks: list[L.Callback] = [average]
    if folder is not None:
        callbacks.append(LayerwiseCheckpoint(folder, every_n_train_steps=100, shared_memory=False))
    options = quiet(max_steps=leg.until, devices=leg.world_size, callbacks=callbacks)
    if leg.plan is not None:
        plan = ParallelPlan.from_dict(leg.plan)
        options["strategy"] = HeteroStrategy(
            plan, ownership=leg.ownership, redundancy=leg.redundancy, whole_after_run=True
        )
    num_pipelines = 1 if leg.plan is None else len(leg.plan["pipelines"])
    loader = StatefulDataLoader(
        Rows(LENGTHS), batch_size=6 // num_pipelines, collate_fn=pack_samples
    )
    module = PackedModule()
    trainer = L.Trainer(**(options | {"enable_checkpointing": folder is not None}))
    trainer.fit(module, loader, ckpt_path=ckpt_path, weights_only=True)
    # In the end the averaged weights are put into the module, whole on every rank.
    return {
        "losses": module.losses,
        "weights": {name: p.detach().numpy().copy() for name, p in module.named_parameters()},
        "num_steps": int(module.num_steps),
        "num_owned": module.num_owned,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
    }


def export(folder: Path, file: Path) -> None:
    """Write the newest checkpoint as one file by the command line's code."""
    from lightning_hetero.cli import main

    assert main(["checkpoint", "export", str(folder), "--output", str(file)]) == 0


class Drops(ToyModule):
    """Draws random numbers in each step."""

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * torch.nn.functional.dropout(torch.ones(8)).mean()


def train(
    folder: Path | str | None,
    num_steps: int,
    *callbacks: L.Callback,
    in_epochs: bool = False,
    ckpt_path: Path | None = None,
    **saving: Any,
) -> list[float]:
    """Train on one device and return the losses; two steps are an epoch."""
    torch.manual_seed(0)
    options = {"every_n_train_steps": 2, "shared_memory": False, **saving}
    module = Drops(ToyOptions())
    limit = {"max_epochs": num_steps // 2} if in_epochs else {"max_steps": num_steps}
    settings = {**quiet(devices=1, **limit), "enable_checkpointing": True}
    trainer = L.Trainer(**settings, callbacks=[LayerwiseCheckpoint(folder, **options), *callbacks])
    torch.manual_seed(1)
    loader = StatefulDataLoader(TokenRows(8), batch_size=4)
    trainer.fit(module, loader, ckpt_path=ckpt_path, weights_only=True)
    return module.losses
