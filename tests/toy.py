"""Small modules that tests train; none of them owes anything to the package."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 23
CONTEXT = 8
ROWS = 4
ADAM_EPS = 1e-2
"""For whatever compares runs after Adam.

Adam divides by the gradient's own size. With its usual eps of 1e-8 a gradient that is zero but for
rounding becomes a step of full length, in a direction that the CPU's kernels choose.
"""


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int = 2) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        # Without bias: a key's bias has no gradient but rounding.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.num_heads = num_heads

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(c, dim=2)
        q, k, v = (
            y.view(b, t, self.num_heads, c // self.num_heads).transpose(1, 2) for y in (q, k, v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, num_layers: int, width: int, *, tied: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, width)
        self.wpe = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.blocks = nn.ModuleList([Block(width) for _ in range(num_layers)])
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe[: ids.shape[1]]
        for index in range(len(self.blocks)):
            x = self.blocks[index](x)
        return self.head(self.ln_f(x))


@dataclass(frozen=True)
class ToyOptions:
    num_layers: int = 3
    width: int = 16
    tied: bool = False
    optimizer: str = "adamw"


class ExactMuon(torch.optim.Muon):
    """Muon that orthogonalises in fp32, not bf16, which would blow up rounding of the gradients."""

    def step(self, closure: Any = None) -> Any:
        with mock.patch.object(Tensor, "bfloat16", lambda tensor: tensor):
            return super().step(closure)


def optimizers_of(parameters: Iterable[nn.Parameter], name: str) -> Any:
    """Return an optimizer with two groups, and its warm-up."""
    given = list(parameters)
    decay, rest = ([p for p in given if (p.ndim >= 2) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    if name == "sgd":
        optimizer: Any = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    elif name == "muon":
        optimizer = ExactMuon(decay, lr=1e-2)  # It takes matrices only.
    else:
        is_fused = name == "fused adamw"
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=ADAM_EPS, fused=is_fused)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=4)
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Compared(L.LightningModule):
    """What `tests.fits` asks of a module: its data, and what it has seen."""

    iteration_rows = ROWS
    """Of an iteration, over all pipelines, where a case says nothing."""
    layers_at: str | None = None
    """The strategy's `layers`."""
    validates = 0
    """How many validation sets there are."""
    predicts = False
    """What it then predicts is what it has seen."""
    seen: Any = None
    """Numbers, or lists of them, that a rank must know, too."""
    collate: Any = None
    loader: Any = DataLoader

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def rows(self, num_empty: int) -> Dataset[Any]:
        return Rows(2 * ROWS, num_empty)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9, weight_decay=0.1)


class ToyModule(Compared):
    """A GPT with uneven numbers of ignored targets, so that weights of micro-batches matter."""

    def __init__(self, options: ToyOptions) -> None:
        super().__init__()
        self.options = options
        self.model = GPT(options.num_layers, options.width, tied=options.tied)

    def loss(self, batch: Any) -> Tensor:
        ids, labels = batch
        logits = self.model(ids)
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        return optimizers_of(self.parameters(), self.options.optimizer)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class TinyModule(Compared):
    """A subclass says what its loss is."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Tiny()

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids, labels = batch
        return self.loss(self.model(ids), labels)


class TokenRows(Dataset[Any]):
    """Rows of token ids; labels are the next tokens, some ignored, unevenly over the rows."""

    def __init__(self, num_rows: int, seed: int = 7) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(VOCABULARY, (num_rows, CONTEXT), generator=generator)
        self.labels = torch.roll(self.ids, -1, dims=1)
        for row in range(num_rows):
            self.labels[row, CONTEXT - 1 - row % (CONTEXT - 2) :] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        return self.ids[index], self.labels[index]


class Rows(TokenRows):
    """Rows of which the first ones of every four may have no targets."""

    def __init__(self, num_rows: int, num_empty: int = 0) -> None:
        super().__init__(num_rows)
        for row in range(num_empty):
            self.labels[row::ROWS] = -100


def loader(num_rows: int, batch_size: int, seed: int = 7) -> DataLoader[Any]:
    return DataLoader(TokenRows(num_rows, seed), batch_size=batch_size)


def quiet(**options: Any) -> dict[str, Any]:
    """Trainer options of a silent run on CPU."""
    return {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **options,
    }
