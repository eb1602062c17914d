"""The module of a recipe: ordinary PyTorch that plain Lightning trains."""

import random
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric

from lightning_hetero.runtime.random_state import seeds_of
from tests.fuzz.recipes import NUM_LAYERS, Recipe
from tests.toy import CONTEXT, VOCABULARY, TokenRows

WIDTH = 8
ROWS = 4
"""Of an iteration, over all pipelines."""
SEED = 5


class Layer(nn.Module):
    """A residual block with the recipe's habits."""

    def __init__(self, recipe: Recipe, index: int) -> None:
        super().__init__()
        self.recipe = recipe
        self.changes_shape = index == 1
        wide = recipe.shape == "wider"
        width_in = 2 * WIDTH if wide and index > 1 else WIDTH
        self.norm = nn.LayerNorm(width_in)
        self.up = nn.Linear(width_in, width_in)
        self.gate = nn.Linear(width_in, 2)
        self.drop = nn.Dropout(0.3 if recipe.dropout else 0.0)
        self.widen = nn.Linear(WIDTH, 2 * WIDTH) if wide and index == 1 else None
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(width_in))
        self.extra_loss: Tensor | None = None
        self.gates: Tensor | None = None

    def forward(self, x: Tensor, table: Tensor | None = None) -> Any:
        recipe = self.recipe
        x = x.float()
        if recipe.inside == "changed in place":
            x = x.mul_(0.9)
        if recipe.buffer == "calls" and self.training:
            self.calls += 1
        if recipe.buffer == "mean" and self.training:
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        gates = self.gate(x)
        self.gates = gates
        self.extra_loss = gates.softmax(-1).square().mean()
        y = self.drop(torch.tanh(self.up(self.norm(x)))) * gates[..., :1].sigmoid()
        if table is not None:
            y = y * (1.0 + table.mean())
        return self._returned(self._reshaped(x + y), gates)

    def _reshaped(self, x: Tensor) -> Tensor:
        if not self.changes_shape:
            return x
        if self.recipe.shape == "shorter":
            return x[:, ::2]
        if self.widen is not None:
            return self.widen(x)
        return x.bfloat16() if self.recipe.shape == "half precision" else x

    def _returned(self, x: Tensor, gates: Tensor) -> Any:
        return x if self.recipe.returned == "tensor" else (x, gates.mean((1, 2), keepdim=True))


class TableFirst(Layer):
    """Takes the hidden state as its second argument."""

    def forward(self, table: Tensor, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, table)


class Model(nn.Module):
    """An embedding, layers and a head, wired as the recipe says."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.table = nn.Parameter(torch.randn(CONTEXT, WIDTH))
        if recipe.table == "buffer":
            del self.table
            self.register_buffer("table", torch.randn(CONTEXT, WIDTH))
        kind = TableFirst if recipe.arguments == "table, hidden" else Layer
        self.layers = nn.ModuleList([kind(recipe, index) for index in range(NUM_LAYERS)])
        width_out = 2 * WIDTH if recipe.shape == "wider" else WIDTH
        self.norm = nn.LayerNorm(width_out)
        self.head = nn.Linear(width_out, VOCABULARY, bias=False)
        if recipe.outer == "tied" and width_out == WIDTH:
            self.head.weight = self.embed.weight
        self.hooked: list[Tensor] = []
        if recipe.collected in ("hook", "logged hook"):
            for layer in self.layers:
                layer.up.register_forward_hook(lambda *args: self.hooked.append(args[2]))

    def forward(self, ids: Tensor) -> Tensor:
        if self.recipe.checkpointed == "model" and self.training:
            return checkpoint(self._logits, ids, use_reentrant=False)
        return self._logits(ids)

    def _logits(self, ids: Tensor) -> Tensor:
        recipe = self.recipe
        self.hooked.clear()
        x = first = self.embed(ids)
        keep = (x.detach().mean(-1, keepdim=True) > 0).float()
        hidden, used = [], torch.zeros(())
        pairs = recipe.checkpointed == "pairs of layers"
        for index in range(0, NUM_LAYERS, 2 if pairs else 1):
            x = self._between(x, index)
            output = self._run(index, x)
            x, extra = output if isinstance(output, tuple) else (output, 0.0)
            used = used + extra
            hidden.append(x)
        x = x.float()
        if recipe.outer == "mask before layers" and x.shape[1] == keep.shape[1]:
            x = x * keep
        if recipe.outer == "embedding added behind" and x.shape == first.shape:
            x = x + first
        if recipe.collected == "sum of hidden states":
            x = torch.stack(hidden).sum(0)
        if recipe.collected == "first hidden state":
            x = x + hidden[0].mean((1, 2), keepdim=True)
        if recipe.returned == "used":
            x = x + used
        return self.head(self.norm(x))

    def _between(self, x: Tensor, index: int) -> Tensor:
        between = self.recipe.between
        if index == 0 or between == "nothing":
            return x
        if between == "relu_":
            return F.relu_(x)
        if between == "add_":
            x += 0.1
            return x
        return x * 1.1 if between == "scaled" else x.view_as(x)

    def _run(self, index: int, x: Tensor) -> Any:
        mode = self.recipe.checkpointed
        call = self._call_two if mode == "pairs of layers" else self._call
        if mode in ("nothing", "model") or not self.training:
            return call(index, x)
        if mode == "pairs of layers":
            return checkpoint(call, index, x, use_reentrant=False)
        return checkpoint(self._call, index, x, use_reentrant=mode == "layers, reentrant")

    def _call_two(self, index: int, x: Tensor) -> Any:
        output = self._call(index, x)
        if index + 1 == NUM_LAYERS:
            return output
        x = output[0] if isinstance(output, tuple) else output
        return self._call(index + 1, self._between(x, index + 1))

    def _call(self, index: int, x: Tensor) -> Any:
        layer, how = self.layers[index], self.recipe.arguments
        table = self.table
        if self.recipe.outer == "embedding in layers":
            table = table + self.embed.weight.mean()
            how = "hidden, table" if how == "hidden" else how
        if how == "hidden":
            return layer(x)
        if how == "keywords":
            return layer(table=table, x=x)
        return layer(table, x) if how == "table, hidden" else layer(x, table)


class FuzzedModule(L.LightningModule):
    """The recipe's model, losses, metrics and optimizer."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.model = Model(recipe)
        self.losses: list[float] = []
        self.validated = {"mean": MeanMetric, "list": CatMetric}.get(recipe.metric, MeanMetric)()
        self.found: list[Tensor] = []
        for name, part in (("embedding", self.model.embed), ("first layer", self.model.layers[0])):
            if recipe.frozen.startswith(name):
                part.requires_grad_(False)

    # -- steps ----------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids, labels = batch
        logits = self.model(ids)
        if self.recipe.dropout:
            logits = logits * (1 + random.random() + float(np.random.rand()))
        return self._reduce(logits, labels[:, : logits.shape[1]]) + self._added()

    def _reduce(self, logits: Tensor, labels: Tensor) -> Tensor:
        flat, wanted = logits.flatten(0, 1), labels.flatten()
        reduction = self.recipe.reduction.removeprefix("declared ")
        if reduction == "sum":
            return F.cross_entropy(flat, wanted, reduction="sum") * 0.05
        if reduction == "masked mean":
            each = F.cross_entropy(flat, wanted, reduction="none")
            return each.sum() / (wanted != -100).sum()
        loss = F.cross_entropy(flat, wanted)
        if reduction == "two losses":
            loss = loss + F.mse_loss(logits.mean(-1), torch.zeros_like(logits[..., 0]))
        return loss

    def _added(self) -> Tensor | float:
        recipe, model = self.recipe, self.model
        if recipe.collected == "loss on layers":
            return sum(layer.extra_loss for layer in model.layers)  # type: ignore[return-value]
        if recipe.collected == "gates on layers":
            return torch.stack([layer.gates.mean(1) for layer in model.layers]).var(0).mean()
        if recipe.collected == "hook":
            return sum(item.square().mean() for item in model.hooked)  # type: ignore[return-value]
        if recipe.collected == "logged hook":
            self.log("hooked", sum(item.detach().mean() for item in model.hooked))
        if recipe.outer == "L2":
            return 0.01 * sum(p.square().sum() for p in self.parameters())  # type: ignore[return-value]
        if recipe.outer == "weight of a layer":
            return 0.01 * model.layers[0].up.weight.square().sum()
        if recipe.outer == "later loss" and self.current_epoch > 0:
            return 0.1 * model.embed.weight.square().mean()
        return 0.0

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        ids, labels = batch
        logits = self.model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, : logits.shape[1]].flatten())
        self.log("val_loss", loss)
        if self.recipe.outer == "decoded in validation":
            decoded = (logits @ self.model.embed.weight).square().mean()
            self.log("decoded", decoded, batch_size=len(ids))
        if self.recipe.metric in ("mean", "list"):
            self.validated.update(logits.detach().mean((1, 2)))
        if self.recipe.metric == "collected":
            self.found.append(logits.detach().mean((1, 2)))
        return {"pred": logits.detach().mean((1, 2))}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.recipe.metric == "outputs in a hook":
            self.found.append(outputs["pred"])

    def on_validation_epoch_end(self) -> None:
        if self.recipe.metric in ("mean", "list"):
            self.log("measured", self.validated.compute().float().mean())
            self.validated.reset()
        if self.found:
            self.log("measured", torch.cat(self.found).mean())
            self.found.clear()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0]).detach()

    # -- training -------------------------------------------------------------------------------

    def on_train_epoch_start(self) -> None:
        if self.recipe.frozen == "embedding until the second epoch" and self.current_epoch > 0:
            self.model.embed.requires_grad_(True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        if self.recipe.groups == "by size":
            large = [p for p in parameters if p.numel() > 50 and p.ndim > 1]
            small = [p for p in parameters if not (p.numel() > 50 and p.ndim > 1)]
            groups: Any = [{"params": large, "weight_decay": 0.1}, {"params": small, "lr": 0.05}]
        elif self.recipe.groups == "by shape":
            groups = [{"params": [p], "lr": 1.0 / p.shape[0]} for p in parameters]
        else:
            groups = parameters
        return torch.optim.SGD(groups, lr=0.1, momentum=0.5)


class DeclaredModule(FuzzedModule):
    """Says by what its loss's mean is taken."""

    def num_target_tokens(self, batch: Any) -> Tensor:
        labels = batch[1]
        shorter = self.recipe.shape == "shorter"
        return (labels[:, : (labels.shape[1] + 1) // 2 if shorter else None] != -100).sum()


class SeededModule(FuzzedModule):
    """Draws what the strategy draws, on one device: one micro-batch a batch, seeded by hand."""

    def __init__(self, recipe: Recipe, num_microbatches: int) -> None:
        super().__init__(recipe)
        self.num_microbatches = num_microbatches
        self.parts: tuple[int, ...] = ()
        for index, layer in enumerate(self.model.layers):
            layer.register_forward_pre_hook(lambda *_, index=index: self._seed(index))
        num_layers = len(self.model.layers)
        self.model.norm.register_forward_pre_hook(lambda *_: self._seed(num_layers))

    def _seed(self, layer: int) -> None:
        """Seed as before a layer; -1 stands for the step before them, their number for the rest."""
        if self.training:
            seeds = seeds_of(len(self.model.layers) + 2, *self.parts)
            torch.manual_seed(seeds[layer + 1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        iteration, index = divmod(batch_idx, self.num_microbatches)
        self.parts = (SEED, 0, self.current_epoch, iteration, index)
        self._seed(-1)
        seed = seeds_of(1, *self.parts)[0]
        random.seed(seed)
        np.random.seed(seed % 2**32)
        return super().training_step(batch, batch_idx)


def module_of(recipe: Recipe) -> FuzzedModule:
    declared = recipe.reduction == "declared masked mean" or (
        # Which of the labels count isn't to be seen in the batch.
        recipe.shape == "shorter" and recipe.reduction in ("mean", "masked mean")
    )
    return DeclaredModule(recipe) if declared else FuzzedModule(recipe)


class FullRows(TokenRows):
    """Rows in which every target counts."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self.labels = torch.roll(self.ids, -1, dims=1)


def loader_of(recipe: Recipe, num_rows: int, batch_size: int) -> DataLoader[Any]:
    full = recipe.dropout or recipe.adds_losses
    rows = FullRows(num_rows) if full else TokenRows(num_rows)
    return DataLoader(rows, batch_size=batch_size)
