"""A toy language model whose tensor-parallel plan has every style."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F

from tests.runtime.case_modules import Recorded
from tests.toy import VOCABULARY

if TYPE_CHECKING:
    from tests.fits import Case

WIDTH = 16
HEAD_DIM = 4

# Fused projections, biases behind sums, dropped and tied weights: what real models have.
TOY_PLAN = {
    "embed": "vocab",
    "blocks.*.qkv": "packed_colwise:3",
    "blocks.*.norm_head": "replicated_with_grad_allreduce",
    "blocks.*.proj": "rowwise",
    "blocks.*.gate_up": "colwise_gather_output",
    "blocks.*.down": "rowwise_split_input",
    "head": "colwise_gather_output",
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.norm_head = nn.LayerNorm(HEAD_DIM)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.gate_up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for y in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(self.norm_head(q), k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(-2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.gelu(gate) * up)


class ToyLM(nn.Module):
    """Its vocabulary of 23 is divided by no degree."""

    def __init__(self, num_layers: int, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=13)
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ToyLMModule(Recorded):
    def __init__(self, case: "Case") -> None:
        super().__init__(case)
        self.model = ToyLM(case.num_layers, tied=case.tied)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels = batch
        logits = self.model(ids)
        loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0])


class UnknownToken(ToyLMModule):
    """One token id is beyond the vocabulary."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = [part.clone() for part in batch]
        parts[0][0, 0] = VOCABULARY + 2
        return super().training_step(parts, batch_idx)
