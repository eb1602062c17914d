"""The modules that cases name: what a user writes around a model, of the sizes of the case."""

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from lightning_hetero.models import LMConfig, PackedBatch, pack_samples
from tests.packed import PackedLM, Samples
from tests.toy import (
    ADAM_EPS,
    GPT,
    VOCABULARY,
    Compared,
    TokenRows,
    ToyModule,
    ToyOptions,
    optimizers_of,
)

if TYPE_CHECKING:
    from tests.fits import Case


class Recorded(Compared):
    """Steps the optimizer that a case asks for."""

    def __init__(self, case: "Case") -> None:
        super().__init__()
        self.case = case

    def rows(self, num_empty: int) -> Dataset[Any]:
        return TokenRows(self.case.num_rows)

    def configure_optimizers(self) -> Any:
        return optimizers_of(self.parameters(), self.case.optimizer)


class RowsModule(ToyModule):
    """The tests' own GPT on rows with uneven numbers of ignored targets."""

    def __init__(self, case: "Case") -> None:
        super().__init__(ToyOptions(case.num_layers, case.width, case.tied, case.optimizer))
        self.case = case

    def rows(self, num_empty: int) -> Dataset[Any]:
        return TokenRows(self.case.num_rows)


class ValidatedModule(RowsModule):
    validates = 1


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

    def __init__(self, case: "Case") -> None:
        super().__init__(case)
        self.requires_grad_(False)
        for block in list(self.model.blocks)[1:]:
            block.qkv = Adapted(block.qkv, rank=2)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, eps=ADAM_EPS)


class PackedSamples(Samples):
    def __init__(self, num_rows: int) -> None:
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(2, 30, (num_rows,), generator=generator).tolist()
        super().__init__(lengths, VOCABULARY)


class PackedModule(PackedLM):
    """The reference model on packed samples of different lengths."""

    collate = staticmethod(pack_samples)

    def __init__(self, case: "Case") -> None:
        config = LMConfig(
            vocab_size=VOCABULARY,
            hidden_size=case.width,
            num_layers=case.num_layers,
            num_heads=4,
            num_kv_heads=2,
            tie_embeddings=case.tied,
            init_std=0.2,
        )
        super().__init__(config)
        self.case = case

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        # An epoch's mean weighs iterations of packed samples by their target tokens.
        size = batch.num_target_tokens
        self.log("train_loss", loss, batch_size=size, on_step=True, on_epoch=True)
        return loss

    def rows(self, num_empty: int) -> Dataset[Any]:
        return PackedSamples(self.case.num_rows)

    def configure_optimizers(self) -> Any:
        return optimizers_of(self.parameters(), self.case.optimizer)


class MaskingModule(Recorded):
    """Masks tokens at random in its step, with every generator there is, and drops out in layers.

    It changes its batch in place. All targets count, so that micro-batches of as many rows have the
    same weight.
    """

    def __init__(self, case: "Case") -> None:
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


MODULES = {
    "gpt": RowsModule,
    "validated": ValidatedModule,
    "packed": PackedModule,
    "masking": MaskingModule,
    "adapted": AdaptedModule,
}
