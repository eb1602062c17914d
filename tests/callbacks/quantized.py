"""A model with quantized weights and adapters, for runs whose ranks are lost."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn

from lightning_hetero.runtime.setup.layout import find_layers
from tests.runtime.huggingface_runs import make_model
from tests.runtime.peft_runs import PeftCase, quantize, with_adapters
from tests.toy import ADAM_EPS, VOCABULARY


class Quantized(L.LightningModule):
    """A model of four layers with LoRA, on the toy's batches.

    Args:
        kind: Of quantization; None leaves it out.
        folder: Its weights, which are quantized while they are read; None builds it in memory.
        is_planned: Whether each rank reads the weights of its layers.
        model: Its family.
        adapters: Options of LoRA.
    """

    def __init__(
        self,
        kind: str | None,
        folder: Path | None,
        *,
        is_planned: bool,
        model: str = "llama",
        adapters: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(5)
        base = make_model(model, vocab_size=VOCABULARY)
        if folder is None and kind is not None:
            _, layers = find_layers(base, None)
            for layer in layers:
                quantize(layer, kind)
        case = PeftCase(
            model=model,
            plan={} if is_planned else None,
            folder=None if folder is None else str(folder),
            while_loading=kind,
            adapters=adapters or {},
        )
        self.model = with_adapters(base, case)
        for name, weight in self.model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.2)

    def training_step(self, batch: Any) -> Any:
        ids, _ = batch
        return self.model(input_ids=ids, labels=ids).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Unfrozen(Quantized):
    """The same without quantization; Lightning's callback unfreezes base layers in epoch 1."""

    def __init__(self, *, is_planned: bool) -> None:
        super().__init__(None, None, is_planned=is_planned)

    @property
    def backbone(self) -> nn.Module:
        found = (getattr(part, "base_layer", None) for part in self.model.modules())
        return nn.ModuleList(part for part in found if part is not None)

    def configure_callbacks(self) -> Any:
        return [BackboneFinetuning(1, backbone_initial_lr=0.05)]

    def configure_optimizers(self) -> Any:
        trained = [weight for weight in self.parameters() if weight.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, eps=ADAM_EPS)


class UnfreezeAfterTwo(L.Callback):
    """Unfreezes base layers after the second step."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            pl_module.backbone.requires_grad_(True)


class UnfrozenOnce(Unfrozen):
    """The same by a callback of one's own; the optimizer has all weights from the start."""

    def configure_callbacks(self) -> Any:
        return [UnfreezeAfterTwo()]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=2e-3, eps=ADAM_EPS)
