"""The modules that cases train: what a user writes around a model, and keeps of its run."""

import random
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_hetero.models import HeteroLM, LMConfig, PackedBatch, pack_samples
from lightning_hetero.models.packing import packed_cross_entropy
from tests.toy import ADAM_EPS, GPT, VOCABULARY, TokenRows

SEED = 11


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained and how; without a plan, on a single device."""

    plan: dict[str, Any] | None = None
    world_size: int = 1
    model: str = "gpt"
    num_layers: int = 3
    width: int = 16
    tied: bool = False
    optimizer: str = "adamw"
    batch_size: int = 2
    num_rows: int = 12
    num_microbatches: int | None = None
    accumulate: int = 1
    clip_val: float | None = None
    clip_algorithm: str = "norm"
    ownership: str = "auto"
    max_epochs: int = 1
    precision: str = "32-true"
    accelerator: str = "cpu"
    options: tuple[tuple[str, Any], ...] = ()
    """More options of the strategy."""

    @property
    def num_pipelines(self) -> int:
        return 1 if self.plan is None else len(self.plan["pipelines"])

    def on_single_device(self) -> "Case":
        """The same run without a plan: its batch is what all pipelines' batches are together."""
        batch_size = self.batch_size * self.num_pipelines
        return replace(
            self, plan=None, world_size=1, batch_size=batch_size, precision="32-true", options=()
        )


class ExactMuon(torch.optim.Muon):
    """Muon that orthogonalises in fp32, not bf16, which would blow up rounding of the gradients."""

    def step(self, closure: Any = None) -> Any:
        with mock.patch.object(Tensor, "bfloat16", lambda tensor: tensor):
            return super().step(closure)


class Recorded(L.LightningModule):
    """Keeps the losses that Lightning's hooks see, and steps the optimizer that a case asks for."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.losses: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.ndim >= 2]
        rest = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        if self.case.optimizer == "sgd":
            optimizer: Any = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        elif self.case.optimizer == "muon":
            optimizer = ExactMuon(decay, lr=1e-2)  # It takes matrices only.
        else:
            optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=ADAM_EPS)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=4)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class RowsModule(Recorded):
    """The tests' own GPT on rows with uneven numbers of ignored targets."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.model = GPT(case.num_layers, case.width, tied=case.tied)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels = batch
        logits = self.model(ids)
        loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(TokenRows(self.case.num_rows), batch_size=self.case.batch_size)


class Adapted(nn.Module):
    """A frozen linear layer and a low-rank one beside it, as LoRA has them."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


class AdaptedModule(RowsModule):
    """All is frozen but adapters of some layers; others, and both ends, have nothing to train."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.requires_grad_(False)
        for block in list(self.model.blocks)[1:]:
            block.qkv = Adapted(block.qkv, rank=2)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, eps=ADAM_EPS)


class PackedSamples(Dataset[Any]):
    def __init__(self, num_rows: int) -> None:
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(2, 30, (num_rows,), generator=generator).tolist()
        self.rows = [torch.randint(VOCABULARY, (n,), generator=generator) for n in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class PackedModule(Recorded):
    """The reference model on packed samples of different lengths."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        config = LMConfig(
            vocab_size=VOCABULARY,
            hidden_size=case.width,
            num_layers=case.num_layers,
            num_heads=4,
            num_kv_heads=2,
            tie_embeddings=case.tied,
            init_std=0.2,
        )
        self.model = HeteroLM(config)

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        logits = self.model(batch.input_ids, batch.cu_seqlens, batch.position_ids, batch.max_seqlen)
        loss = packed_cross_entropy(logits, batch.labels)
        # An epoch's mean weighs iterations of packed samples by their target tokens.
        size = batch.num_target_tokens
        self.log("train_loss", loss, batch_size=size, on_step=True, on_epoch=True)
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(
            PackedSamples(self.case.num_rows),
            batch_size=self.case.batch_size,
            collate_fn=pack_samples,
        )


class MaskingModule(Recorded):
    """Masks tokens at random in its step, with every generator there is, and drops out in layers.

    It changes its batch in place. All targets count, so that micro-batches of as many rows have the
    same weight.
    """

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.model = GPT(case.num_layers, case.width, tied=case.tied)
        for block in self.model.blocks:
            block.norm1 = nn.Sequential(block.norm1, nn.Dropout(0.3))
        self.model.ln_f = nn.Sequential(self.model.ln_f, nn.Dropout(0.3))
        self.drawn: list[tuple[float, ...]] = []

    def num_target_tokens(self, batch: Any) -> int:
        return batch[0].numel()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, _ = batch
        ids.add_(1).remainder_(VOCABULARY)
        draws = (random.random(), float(np.random.rand()), float(torch.rand(())))
        self.drawn.append(draws)
        masked = torch.where(torch.rand(ids.shape) < 0.2 + 0.1 * draws[0], 0, ids)
        logits = self.model(masked) * (1 + draws[1] + torch.rand(()))
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), ids.reshape(-1))

    def train_dataloader(self) -> Any:
        return DataLoader(TokenRows(self.case.num_rows), batch_size=self.case.batch_size)


MODULES = {
    "gpt": RowsModule,
    "packed": PackedModule,
    "masking": MaskingModule,
    "adapted": AdaptedModule,
}
