"""Tiny Hugging Face models, and cases of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from lightning_hetero.models import pack_samples
from lightning_hetero.models.huggingface import (
    load_pretrained,
    packed_inputs,
    use_packed_attention,
)
from tests.fits import Case
from tests.toy import Compared

VOCABULARY = 29
CONTEXT = 10

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "qwen3": {**_GROUPED, "head_dim": 8, "tie_word_embeddings": True},
    "gemma3_text": {
        **_GROUPED,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_neox": {**_COMMON, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "phi3": _GROUPED,
    "mixtral": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_embd": 16,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 32,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "bert": {**_COMMON, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
UNPLANNED_CONFIGS: dict[str, dict[str, Any]] = {
    "bloom": {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "n_layer": 4,
        "n_head": 4,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    },
}
"""Of models without a plan for sharding, or whose attention can't be exchanged."""


def make_config(name: str, **changes: Any) -> Any:
    return transformers.AutoConfig.for_model(
        name, **{**(CONFIGS | UNPLANNED_CONFIGS)[name], **changes}
    )


def auto_class(name: str) -> Any:
    masked = name == "bert"
    return transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM


def make_model(name: str, **changes: Any) -> Any:
    return auto_class(name).from_config(make_config(name, **changes))


def quantization(kind: str) -> Any:
    """Return transformers' config of a quantization."""
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        return transformers.TorchAoConfig(Int8WeightOnlyConfig())
    if kind == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind.removesuffix("-double"),
        bnb_4bit_use_double_quant=kind.endswith("-double"),
    )


@dataclass(frozen=True, kw_only=True)
class HuggingFaceCase(Case):
    """What is trained and how; without a plan, on a single device."""

    model: str
    batch_size: int = 4
    num_rows: int = 24
    num_microbatches: int | None = 2
    loss: str = "inside"
    """Made "inside" the model's forward, or "outside" in the step."""
    padded: bool = False
    own_checkpointing: bool = False
    """Turn the model's own gradient checkpointing on."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the model's configuration."""
    source: str = "cpu"
    """The device on which the model is built."""
    folder: Path | str | None = None
    """A saved model: read layer by layer with a plan, by transformers without one."""
    while_loading: str | None = None
    """What the folder's weights are quantized by while they are read."""
    packed: bool = False
    """Whether batches are samples of different lengths laid end to end."""

    def module(self) -> Any:
        return HuggingFaceModule(self)

    def weights_of(self, module: Any) -> Mapping[str, Tensor]:
        """Return all weights; of Gemma the factors of norms, of which it keeps what exceeds one."""
        keeps_rest = "gemma" in self.model and self.config
        return {
            name: value + 1 if keeps_rest and "norm" in name else value
            for name, value in module.state_dict().items()
        }


def base_model(case: HuggingFaceCase) -> Any:
    """Return a case's model, in training mode."""
    if case.folder is None:
        with torch.device(case.source):
            return make_model(case.model, **case.config)
    kind = auto_class(case.model)
    how = None if case.while_loading is None else quantization(case.while_loading)
    if case.plan is not None:
        return load_pretrained(case.folder, kind, quantization_config=how)
    given = {} if how is None else {"quantization_config": how}
    return kind.from_pretrained(case.folder, dtype=torch.float32, **given).train()


class Rows(Dataset[Any]):
    """Rows of tokens with padding and targets that differ in number."""

    def __init__(self, case: HuggingFaceCase) -> None:
        generator = torch.Generator().manual_seed(3)
        shape = (case.num_rows, CONTEXT)
        self.ids = torch.randint(3, VOCABULARY, shape, generator=generator)
        self.mask = torch.ones(shape, dtype=torch.long)
        self.labels = self.ids.clone()
        if case.model == "bert":
            self.labels[torch.rand(shape, generator=generator) < 0.6] = -100
        for row in range(case.num_rows):
            stop = CONTEXT - row % 5
            self.labels[row, stop:] = -100
            if case.padded:
                self.ids[row, stop:] = 2
                self.mask[row, stop:] = 0

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "input_ids": self.ids[index],
            "attention_mask": self.mask[index],
            "labels": self.labels[index],
        }


class HuggingFaceModule(Compared):
    """What a user writes around a Hugging Face model."""

    def __init__(self, case: HuggingFaceCase) -> None:
        super().__init__()
        self.case = case
        self.model = base_model(case)
        if case.packed:
            use_packed_attention(self.model)
        if case.own_checkpointing:
            self.model.gradient_checkpointing_enable()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.case.packed:
            return self.model(**packed_inputs(batch, labels=True)).loss
        if not self.case.padded:
            batch = {name: value for name, value in batch.items() if name != "attention_mask"}
        if self.case.loss == "inside":
            loss: Tensor = self.model(**batch).loss
            return loss
        labels = batch.pop("labels")
        logits = self.model(**batch).logits.float()
        if self.case.model != "bert":
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def rows(self, num_empty: int) -> Any:
        if not self.case.packed:
            return Rows(self.case)
        generator = torch.Generator().manual_seed(4)
        return [
            torch.randint(3, VOCABULARY, (2 + index * 7 % 13,), generator=generator)
            for index in range(self.case.num_rows)
        ]

    @property
    def collate(self) -> Any:
        return pack_samples if self.case.packed else None
