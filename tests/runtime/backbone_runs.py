"""Models with adapters whose base Lightning's own `BackboneFinetuning` unfreezes in mid-run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn

from lightning_hetero.callbacks import LayerwiseCheckpoint
from tests.runtime.huggingface_runs import SEED, run
from tests.runtime.peft_runs import PeftCase, PeftModule
from tests.toy import ADAM_EPS

UNFREEZES = 1
"""The epoch that begins with it."""
NUM_EPOCHS = 4


class WithBackbone(PeftModule):
    """Names what `BackboneFinetuning` freezes: base layers that have adapters, or whole layers."""

    def __init__(self, case: "BackboneCase") -> None:
        super().__init__(case)
        self.is_whole = case.whole
        if case.whole:
            self.model.base_model.model.lm_head.requires_grad_(True)

    @property
    def backbone(self) -> nn.Module:
        layers = next(
            part
            for part in self.model.modules()
            if isinstance(part, nn.ModuleList) and len(part) == 4
        )
        if self.is_whole:
            return layers
        return nn.ModuleList(
            part.base_layer for part in layers.modules() if hasattr(part, "base_layer")
        )

    def configure_optimizers(self) -> Any:
        trained = [weight for weight in self.parameters() if weight.requires_grad]
        return torch.optim.AdamW(trained, lr=0.02, eps=ADAM_EPS)


@dataclass(frozen=True, kw_only=True)
class BackboneCase(PeftCase):
    """A PEFT model whose base is unfrozen."""

    whole: bool = False
    """Whether whole layers are, with their adapters; if not, only what has adapters."""
    num_rows: int = 8


class Notes(L.Callback):
    """Keeps each epoch's learning rates, and how many values this rank owns."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []
        self.owned: list[int] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])
        engine = getattr(trainer.strategy, "engine", None)
        if engine is not None:
            self.owned.append(sum(item.numel() for item in engine.store.masters.values()))


@dataclass(frozen=True)
class Outcome:
    """What a rank knows after a run."""

    losses: list[float]
    rates: list[list[float]]
    owned: list[int]
    weights: dict[str, Any]


def train(
    rank: int,
    case: BackboneCase,
    num_epochs: int = NUM_EPOCHS,
    file: Path | None = None,
    folder: Path | None = None,
) -> Outcome:
    """Train a case, from a file if there is one, which else is written at the end.

    A folder is of layer-wise checkpoints, from the newest of which training goes on.
    """
    L.seed_everything(SEED, verbose=False)
    module, notes = WithBackbone(case), Notes()
    unfreeze = BackboneFinetuning(UNFREEZES, lambda_func=_double, backbone_initial_ratio_lr=0.1)
    how: dict[str, Any] = {"max_epochs": num_epochs, "max_steps": -1}
    if file is not None and file.exists():
        how |= {"ckpt_path": file, "weights_only": False}
    callbacks: list[L.Callback] = [unfreeze, notes]
    if folder is not None:
        how["enable_checkpointing"] = True
        callbacks += [LayerwiseCheckpoint(folder, every_n_train_steps=1, shared_memory=False)]
    trainer = run(module, case, *callbacks, **how)
    if file is not None and "ckpt_path" not in how:
        trainer.save_checkpoint(file)
    weights = {name: item.detach().numpy().copy() for name, item in module.named_parameters()}
    return Outcome(module.losses, notes.rates, notes.owned, weights)


def _double(epoch: int) -> float:
    return 2.0
