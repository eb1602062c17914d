"""Tiny Hugging Face models with adapters, some with quantized weights, that parity tests train."""

from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import nn

from lightning_hetero import ParallelPlan
from lightning_hetero.core.errors import ModelError
from lightning_hetero.models.huggingface import add_adapters
from tests.exchange.message_lists import pulls_of, pushes_of
from tests.runtime.huggingface_runs import (
    SEED,
    HuggingFaceCase,
    HuggingFaceModule,
    run,
)

TARGETS = {
    "gpt2": ["c_attn", "c_proj"],
    "bert": ["query", "value"],
    "default": ["q_proj", "v_proj", "o_proj"],
}


@dataclass(frozen=True, kw_only=True)
class PeftCase(HuggingFaceCase):
    """What is trained and how; without a plan, by plain Lightning in one process."""

    model: str = "llama"
    quantized: str | None = None
    """One of "nf4", "fp4", "int8", "torchao"."""
    plans: tuple[dict[str, Any], ...] = ()
    """Plans that the run changes to, after its first iteration, second, and so on."""
    adapters: dict[str, Any] = field(default_factory=dict)
    """Options of the adapters' config."""
    method: str = "LoraConfig"
    """Class of the config."""
    more_adapters: int = 0
    """Adapters beside the first one; all are active."""
    max_steps: int = 4
    validates: bool = False
    """Whether it validates before it trains, and after each epoch."""


def quantize(module: nn.Module, kind: str) -> None:
    """Quantize all linear layers in a module, in place."""
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(module, Int8WeightOnlyConfig())
        return
    import bitsandbytes as bnb

    for name, item in list(module.named_modules()):
        if type(item) is not nn.Linear:
            continue
        sizes: dict[str, Any] = {"bias": item.bias is not None}
        if kind == "int8":
            made = bnb.nn.Linear8bitLt(
                item.in_features, item.out_features, has_fp16_weights=False, **sizes
            )
            made.weight = bnb.nn.Int8Params(
                item.weight.data, requires_grad=False, has_fp16_weights=False
            )
        else:
            made = bnb.nn.Linear4bit(
                item.in_features, item.out_features, compute_dtype=torch.float32, **sizes
            )
            made.weight = bnb.nn.Params4bit(item.weight.data, quant_type=kind, module=made)
        made.bias = item.bias
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, made.to("cpu"))


def with_adapters(model: Any, case: PeftCase) -> Any:
    """Return a case's base model with its adapters."""
    import peft

    options: dict[str, Any] = {}
    if case.method == "LoraConfig":
        targets = TARGETS.get(case.model, TARGETS["default"])
        options = {"r": 3, "lora_alpha": 8, "target_modules": targets}
        options["fan_in_fan_out"] = case.model == "gpt2"
    adapters = getattr(peft, case.method)(**{**options, **case.adapters})
    if case.folder is None:
        return peft.get_peft_model(model, adapters)
    wrap: Any = peft.get_peft_model if case.plan is None else add_adapters
    torch.manual_seed(SEED)  # Reading may draw numbers.
    return wrap(model, adapters)


class ChangePlans(L.Callback):
    """Changes the plan after iterations."""

    def __init__(self, plans: tuple[dict[str, Any], ...]) -> None:
        self.left = [ParallelPlan.from_dict(plan) for plan in plans]

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self.left:
            trainer.strategy.change_plan(self.left.pop(0))  # type: ignore[attr-defined]


class PeftModule(HuggingFaceModule):
    """What a user writes around a model with adapters."""

    def __init__(self, case: PeftCase) -> None:
        super().__init__(case)
        if case.quantized:
            for part in self.model.modules():
                if isinstance(part, nn.ModuleList) and len(part) == 4:
                    quantize(part, case.quantized)
                    break
        self.model = with_adapters(self.model, case)
        for index in range(case.more_adapters):
            self.model.add_adapter(f"more{index}", self.model.peft_config["default"])
        if case.more_adapters:
            self.model.base_model.set_adapter(["default", "more0"])
        for name, weight in self.model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.2)
            if "ia3_l" in name:
                nn.init.normal_(weight, mean=1.0, std=0.2)

    def validation_step(self, batch: dict[str, Any]) -> Any:
        return self.model(**batch).loss


@dataclass(frozen=True)
class PeftOutcome:
    """What a rank knows after a run."""

    losses: list[float]
    trained: dict[str, np.ndarray]


def train(rank: int, case: PeftCase, *callbacks: L.Callback, ckpt_path: Any = None) -> PeftOutcome:
    """Train a case on one of its ranks."""
    module = fit(case, *callbacks, ckpt_path=ckpt_path)
    trained = {
        name: weight.detach().numpy().copy()
        for name, weight in module.named_parameters()
        if weight.requires_grad
    }
    return PeftOutcome(module.losses, trained)


def fit(case: PeftCase, *callbacks: L.Callback, ckpt_path: Any = None) -> PeftModule:
    """Train a case, and return its module."""
    L.seed_everything(SEED, verbose=False)
    module = PeftModule(case)
    changes = [ChangePlans(case.plans)] if case.plan is not None and case.plans else []
    how: dict[str, Any] = {"enable_checkpointing": bool(callbacks), "max_steps": case.max_steps}
    validated = module.train_dataloader() if case.validates else None
    run(module, case, *callbacks, *changes, val_dataloaders=validated, ckpt_path=ckpt_path, **how)
    return module


class Count(L.Callback):
    """Counts the elements that a rank owns, sends and receives in an iteration, and all trained."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        engine = trainer.strategy.engine  # type: ignore[attr-defined]
        table, rank = engine.plans.running.table, trainer.global_rank
        self.counts = (
            sum(item.numel() for item in engine.store.masters.values()),
            sum(item.numel for item in pulls_of(table, rank)),
            sum(item.numel for item in pushes_of(table, rank)),
            sum(s.numel for s in engine.store.specs.values() if s.requires_grad),
        )


def train_and_count(rank: int, case: PeftCase) -> tuple[int, ...]:
    """Train a case on one of its ranks; return what moved."""
    count = Count()
    train(rank, case, count)
    return count.counts


def train_with_checkpoints(rank: int, case: PeftCase, folder: Any) -> PeftOutcome:
    """Train a case, going on from the newest layer-wise checkpoint in a folder."""
    from lightning_hetero.callbacks import LayerwiseCheckpoint

    saves = LayerwiseCheckpoint(folder, every_n_train_steps=2, shared_memory=False)
    return train(rank, case, saves)


def train_and_resume(rank: int, case: PeftCase, file: Any) -> list[float]:
    """Train half of a case, save a whole checkpoint, and train the other half from it."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    half = replace(case, max_steps=case.max_steps // 2)
    saves = ModelCheckpoint(file.parent, file.stem, every_n_train_steps=half.max_steps)
    train(rank, half, saves)
    return train(rank, case, ckpt_path=file).losses


def save_adapters(rank: int, case: PeftCase, folder: Any) -> None:
    """Train a case, and write its adapters by `save_pretrained`; PEFT reads them."""
    import peft

    module = fit(case)
    if rank == 0:
        module.model.save_pretrained(folder)
        base = HuggingFaceModule(HuggingFaceCase(model=case.model, config=case.config)).model
        peft.PeftModel.from_pretrained(base, folder)


def refusal(rank: int, case: PeftCase) -> str:
    """Return the error with which a case is refused on a rank."""
    try:
        fit(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Unfreeze(L.Callback):
    """Unfreezes a weight of the base model before the first step, or after some steps."""

    def __init__(self, after: int) -> None:
        self.after = after

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.after == 0:
            self._unfreeze(pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == self.after:
            self._unfreeze(pl_module)

    def _unfreeze(self, module: L.LightningModule) -> None:
        for name, weight in module.named_parameters():
            if "layers.2.mlp.up_proj" in name:
                weight.requires_grad_(True)


def train_and_unfreeze(rank: int, case: PeftCase, after: int) -> PeftOutcome | str:
    """Train a case whose base is unfrozen in part; return the error if it is refused."""
    try:
        return train(rank, case, Unfreeze(after))
    except ModelError as error:
        return str(error)
