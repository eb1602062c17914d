"""Tiny Hugging Face models with adapters, some with quantized weights, and cases of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.models.huggingface import add_adapters
from tests.fits import SEED, Case
from tests.runtime.huggingface_runs import HuggingFaceCase, HuggingFaceModule

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
    """One of "nf4", "fp4", "int8", "torchao", "float8", "intx"."""
    adapters: dict[str, Any] = field(default_factory=dict)
    """Options of the adapters' config."""
    method: str = "LoraConfig"
    """Class of the config."""
    more_adapters: int = 0
    """Adapters beside the first one; all are active."""
    max_steps: int = 4
    validates: bool = False
    """Whether it validates before it trains, and after each epoch; one device never does."""

    def on_single_device(self) -> Case:
        return replace(super().on_single_device(), validates=False, trainer={})

    def module(self) -> Any:
        return PeftModule(self)

    def weights_of(self, module: Any) -> Mapping[str, Tensor]:
        """Return what is trained."""
        return {name: item for name, item in module.named_parameters() if item.requires_grad}


def quantize(module: nn.Module, kind: str) -> None:
    """Quantize all linear layers in a module, in place."""
    if kind in ("torchao", "float8", "intx"):
        from torchao import quantization as torchao

        torchao.quantize_(
            module,
            {
                "torchao": torchao.Int8WeightOnlyConfig,
                "float8": torchao.Float8WeightOnlyConfig,
                "intx": partial(torchao.IntxWeightOnlyConfig, weight_dtype=torch.int4),
            }[kind](),
        )
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


class PeftModule(HuggingFaceModule):
    """What a user writes around a model with adapters."""

    def __init__(self, case: PeftCase) -> None:
        super().__init__(case)
        self.validates = case.validates
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
