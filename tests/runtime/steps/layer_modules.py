"""Modules by how they use their layers: what these hand on, return and keep, and who calls them."""

import os
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from tests.toy import ROWS, VOCABULARY, Compared, TinyModule

WIDTH, NUM_TOKENS = 8, 8


SHOWN = ("shown", "number", "made in forward")


class HandingLayer(nn.Module):
    """Changes width, tokens or dtype of the hidden state, as its kind says."""

    def __init__(self, kind: str, index: int) -> None:
        super().__init__()
        widths = [WIDTH, 12, 4, WIDTH] if kind == "width" else [WIDTH] * 4
        self.linear = nn.Linear(widths[index], widths[index + 1])
        self.kind, self.index = kind, index
        self.kept: list[Tensor] = []
        self.cache: Tensor | None = None
        if kind in ("shown", "number"):
            self.shown = torch.zeros(()) if kind == "shown" else 0.0
        if kind == "looked into":
            self.linear.register_forward_hook(lambda *args: float(args[-1].detach().sum()) and None)

    def forward(self, x: Tensor, scale: Tensor, rest: Any = None) -> Any:
        if self.kind == "overwritten" and self.index == 0:
            x.mul_(0.5)
        y = torch.tanh(self.linear(x)) * scale
        self._keep(y)
        if self.kind == "cached":
            y = y * self.cache
        if self.kind == "named":
            return {"hidden": y}
        if self.kind == "nested":
            return torch.nested.as_nested_tensor(list(y))
        if self.kind == "returned":
            # A note that is longer than the header of a message usually is.
            return y, {"loss": y.square().mean(), "rows": len(y), "note": "." * 600}
        if self.kind == "handed on":
            # The first layer makes what all of them use, as T5's do.
            rest = y[:, :, :2] if rest is None else rest
            return y * rest.sum(-1, keepdim=True), rest
        if self.kind == "pool":
            # Half the tokens behind the first layer, and all of them again behind the second.
            return [y[:, ::2], y.repeat_interleave(2, 1), y][self.index]
        if self.kind == "ragged":
            # The data say how many tokens go on.
            return y[:, : 2 + int((x.detach().sum(-1) > 0).sum()) % 4]
        if self.kind == "dtype":
            return y.bfloat16() if self.index == 0 else y
        return y

    def _keep(self, y: Tensor) -> None:
        if self.kind == "listed":
            self.kept[:] = [y.mean()]
        if self.kind in SHOWN:
            self.shown = y.mean().item() if self.kind == "number" else y.detach().mean()
        if self.kind == "cached" and self.cache is None:
            self.cache = torch.ones(y.shape[1], 1)


class Regression(Compared):
    validates = True

    def rows(self, num_empty: int) -> Dataset[Any]:
        x = torch.randn(2 * ROWS, NUM_TOKENS, 3, generator=torch.Generator().manual_seed(3))
        return TensorDataset(x, x.sum(-1)[:, :1])

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class HandsOn(Regression):
    """A regression on layers of a kind; losses that they return are in its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList([HandingLayer(kind, index) for index in range(3)])
        self.head = nn.Linear(WIDTH, 1)
        self.kind = kind

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        found = []
        with torch.autocast("cpu", torch.bfloat16, enabled=self.kind == "dtype"):
            first = x = self.embed(batch[0]).float()
            scale = torch.linspace(0.5, 1.5, NUM_TOKENS)[:, None]
            rest: Any = None
            for layer in self.layers:
                # What a layer gets besides the hidden state may depend on its shape.
                output = layer(x, scale[: x.shape[1]], rest)
                output = output["hidden"] if isinstance(output, dict) else output
                x, rest = output if isinstance(output, tuple) else (output, None)
                if self.kind == "returned":
                    found.append(rest["loss"] * rest["rows"])
        logits = self.head(x.float()).mean(1)
        if self.kind == "overwritten":
            logits = logits + first.mean(2).mean(1, keepdim=True)
        if self.kind == "listed":
            found = [layer.kept[0] for layer in self.layers]
        if self.kind in SHOWN:
            self.log("shown", sum(layer.shown for layer in self.layers))
        return F.mse_loss(logits, batch[1]) + 0.1 * sum(found)


EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 8},
}


class Catches(HandsOn):
    """Goes on after any exception of its layers, as code with a fallback does."""

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        try:
            return super().loss(batch, batch_idx)
        except Exception:
            return self.head.weight.sum()


class Router(Regression):
    """A Hugging Face mixture of experts; a part of its loss needs the logits of all routers."""

    layers_at = "net.model.layers"

    def __init__(self, kind: str) -> None:
        super().__init__()
        config = transformers.AutoConfig.for_model(
            kind,
            vocab_size=11,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts_per_tok=2,
            initializer_range=0.2,
            pad_token_id=0,
            output_router_logits=True,
            router_aux_loss_coef=0.5,
            **EXPERTS[kind],
        )
        self.net = transformers.AutoModelForCausalLM.from_config(config)

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        ids = 1 + (3 * batch[0][..., 0]).long().abs() % 10
        outputs = self.net(input_ids=ids, labels=ids)
        assert len(outputs.router_logits) == 3, [tuple(i.shape) for i in outputs.router_logits]
        return outputs.loss


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Free(Regression):
    """A trunk of several blocks, called in ways that no pipeline could carry."""

    iteration_rows = 2 * ROWS
    layers_at = "blocks"

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList([self._block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 2)

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

    def rows(self, num_empty: int) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(6 * ROWS, 3, generator=generator)
        y = torch.randint(2, (6 * ROWS,), generator=generator)
        y[::5] = -100  # So that micro-batches weigh differently.
        return TensorDataset(x, y)

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        passes = 2 if self.kind == "two passes" else 1
        found = sum(self(batch[0] + index, batch_idx) for index in range(passes))
        return F.cross_entropy(found, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class ShiftedLayer(Residual):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x) + shift


class Outer(TinyModule):
    """Reads parameters outside its layers early, late, seldom, or without gradients."""

    layers_at = "model.layers"
    validates = predicts = True

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.model = nn.ModuleDict({"layers": nn.ModuleList([ShiftedLayer() for _ in range(3)])})
        self.heads = nn.ModuleList([nn.Linear(WIDTH, VOCABULARY) for _ in range(2)])

    def forward(self, ids: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(ids)
        keep = (self.embed.weight.detach()[ids].mean(-1, keepdim=True) > 0).float()
        shift = self.shift if self.kind == "read in layers" else torch.zeros(())
        if self.kind == "looked at" and bool(self.embed.weight.detach().mean() > -9):
            shift = torch.ones(())
        for layer in self.model["layers"]:
            x = layer(x, shift)
        if self.kind == "mask made early":
            x = x * keep
        logits: Tensor = self.heads[batch_idx % 2 if self.kind == "heads by batch" else 0](x)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self(batch[0], batch_idx), batch[1])
        if self.kind == "loss from the second epoch" and self.current_epoch:
            loss = loss + self.embed.weight.square().mean()
        if self.kind == "loss from the second step" and self.global_step:
            loss = loss + self.embed.weight.square().mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0], batch_idx)
        self.log("val", self.loss(logits, batch[1]))
        if self.kind == "decoded in validation":
            found = logits.softmax(-1) @ self.embed.weight @ self.embed.weight.T
            self.log("decoded", self.loss(found, batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0], batch_idx)
        if self.kind == "decoded in prediction":
            return logits.softmax(-1) @ self.embed.weight
        return logits


class Penalised(TinyModule):
    """Adds to its loss what it computes of parameters themselves.

    Args:
        penalty: "before" the model: of all parameters; "behind" it: the same; or a layer's number.
    """

    def __init__(self, penalty: str | int) -> None:
        super().__init__()
        self.penalty = penalty

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        penalty: Any = 0.0
        if self.penalty == "before":
            penalty = sum(p.square().sum() for p in self.parameters())
        loss = super().training_step(batch, batch_idx)
        if self.penalty == "behind":
            penalty = torch.stack([p.square().sum() for p in self.parameters()]).sum()
        if isinstance(self.penalty, int):
            penalty = self.model.layers[self.penalty][0].weight.abs().sum()
        return loss + 1e-2 * penalty


class KeepingLayer(nn.Module):
    """Keeps in buffers "counts", "unversioned" counts, a running "mean", or "norms": BatchNorm.

    Without a place in the state: "scratch counts", "frequencies" of each micro-batch's first value,
    and a "cache" that grows and is filled again with what it holds.
    """

    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if keeps == "norms" else nn.Identity()
        self.keeps = keeps
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scratch", torch.zeros(()), persistent=False)
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.keeps == "counts":
            self.count = self.count + 1
        if self.training and self.keeps == "unversioned":
            self.count.data.add_(1)
        if self.training and self.keeps == "mean":
            self.mean.lerp_(x.detach().mean(0), 0.2)
        if self.training and self.keeps == "scratch counts":
            self.scratch += 1
        if self.training and self.keeps == "frequencies":
            self.scratch.copy_(x.detach()[0, 0])
        if self.keeps == "cache":
            self.scratch.copy_(torch.ones(()))
            if len(self.table) < 3 * len(x):
                self.table = torch.ones(len(self.table) + 1)
        x = x + self.scratch
        # What is evaluated depends on the buffers.
        return torch.tanh(self.norm(self.linear(x))) + 0.1 * self.count + self.mean


class Keeps(Regression):
    iteration_rows = 2 * ROWS

    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([KeepingLayer(keeps) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("drawn", torch.rand(WIDTH), persistent=keeps != "cache")
        self.drawn += int(os.environ.get("RANK", "0"))  # Rank 0's is what counts.

    @property
    def seen(self) -> Any:
        return [value.tolist() for name, value in self.named_buffers() if "table" not in name]

    def rows(self, num_empty: int) -> Dataset[Any]:
        x = torch.randn(8 * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, x.sum(1, keepdim=True))

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] + self.drawn
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.head(x), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch, batch_idx)
        if self.layers[0].keeps == "counts":
            self.steps += 1  # On last stages only.
        return loss
