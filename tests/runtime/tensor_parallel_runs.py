"""Runs of the tensor-parallel tests, and a toy whose plan has every style."""

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_hetero import HeteroStrategy, ParallelPlan
from tests.runtime.runs import MODULES, SEED, Case, Outcome, Recorded, Watch
from tests.toy import CONTEXT, VOCABULARY, TokenRows, quiet

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
    def __init__(self, case: Case) -> None:
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

    def train_dataloader(self) -> Any:
        return StatefulDataLoader(TokenRows(self.case.num_rows), batch_size=self.case.batch_size)


class UnknownToken(ToyLMModule):
    """One token id is beyond the vocabulary."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = [part.clone() for part in batch]
        parts[0][0, 0] = VOCABULARY + 2
        return super().training_step(parts, batch_idx)


OWN_MODULES = {"toy": ToyLMModule, "unknown id": UnknownToken}


def make_module(case: Case) -> Recorded:
    return (OWN_MODULES | MODULES)[case.model](case)


class SaveAt(L.Callback):
    def __init__(self, step: int, path: str) -> None:
        self.step = step
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def train_sharded(
    rank: int,
    case: Case,
    options: dict[str, Any],
    save_at: int = 0,
    path: str = "",
    resume: str | None = None,
) -> Outcome:
    """Train a case with options of the strategy, save at a step, begin at a checkpoint."""
    L.seed_everything(SEED, verbose=False)
    module = make_module(case)
    watch = Watch()
    strategy: dict[str, Any] = {"devices": 1}
    if case.plan is not None:
        hetero = HeteroStrategy(
            plan=ParallelPlan.from_dict(case.plan),
            num_microbatches=case.num_microbatches,
            ownership=case.ownership,
            whole_after_run=True,
            **options,
        )
        strategy = {"strategy": hetero, "devices": case.world_size}
    trainer = L.Trainer(
        **quiet(callbacks=[watch, SaveAt(save_at, path)], max_epochs=case.max_epochs),
        **strategy,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip_val,
        use_distributed_sampler=False,
    )
    trainer.fit(module, ckpt_path=resume)
    return Outcome(
        losses=module.losses,
        weights={name: value.numpy() for name, value in module.state_dict().items()},
        logged={name: float(value) for name, value in trainer.callback_metrics.items()},
        parameter_bytes=watch.parameter_bytes,
        held=watch.held,
        own_bytes=watch.own_bytes,
        peak_in_flight=watch.peak_in_flight,
        batches_seen=trainer.global_step,
    )


def fit_error(rank: int, case: Case, options: dict[str, Any]) -> str:
    """Return the error with which a run is refused on this rank."""
    try:
        train_sharded(rank, case, options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def predict_sharded(rank: int, case: Case, options: dict[str, Any]) -> list[np.ndarray]:
    L.seed_everything(SEED, verbose=False)
    assert case.plan is not None
    plan = ParallelPlan.from_dict(case.plan)
    hetero = HeteroStrategy(plan=plan, whole_after_run=True, **options)
    trainer = L.Trainer(**quiet(), strategy=hetero, devices=case.world_size)
    module = ToyLMModule(case)
    outputs = trainer.predict(module, DataLoader(TokenRows(8), batch_size=4))
    with torch.no_grad():
        expected = [module.model(ids) for ids, _ in DataLoader(TokenRows(8), batch_size=4)]
    return [(a - b).abs().max().numpy() for a, b in zip(outputs, expected, strict=True)]


def read_states(rank: int, path: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the optimizer's state in a checkpoint, by parameter index."""
    content = torch.load(Path(path), weights_only=True)
    state = content["optimizer_states"][0]["state"]
    return {str(index): tuple(item["exp_avg"].shape) for index, item in state.items()}


__all__ = [
    "CONTEXT",
    "TOY_PLAN",
    "ToyLM",
    "fit_error",
    "make_module",
    "predict_sharded",
    "read_states",
    "train_sharded",
]
