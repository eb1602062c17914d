"""Build a pretrained Hugging Face model without its weights, which remembers where they lie."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)

from lightning_hetero.core.errors import ModelError
from lightning_hetero.models.huggingface.conversion import map_tensors
from lightning_hetero.models.stored import Box, SafetensorsFile, StoredTensor, open_folder

__all__ = ["PretrainedWeights", "load_pretrained"]


@dataclass(frozen=True, kw_only=True)
class PretrainedWeights:
    """Where a model's weights lie; `HeteroStrategy` reads each rank's slices from it."""

    files: Sequence[SafetensorsFile]
    tensors: Mapping[str, StoredTensor]
    """By the model's names of parameters and buffers."""

    @property
    def num_bytes_read(self) -> int:
        """Bytes of tensors read so far, in this process."""
        return sum(file.num_bytes_read for file in self.files)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of one tensor, on CPU, in the dtype of the file."""
        return self.tensors[name].read(box)


def load_pretrained(
    folder: str | Path,
    kind: Any = AutoModelForCausalLM,
    *,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> PreTrainedModel:
    """Return a model on the meta device whose weights `HeteroStrategy` reads slice by slice.

    Each rank reads the byte ranges of the slices that it owns; together they read the folder once.
    What the folder lacks, such as a new head, is drawn by the model's own initialisation. Unlike
    `from_pretrained` it leaves the model in training mode.

    Args:
        folder: A local folder with config.json and safetensors files, also sharded ones.
        kind: Which model to build: a class of transformers' AutoModel or a model's own.
        dtype: Of the weights; Trainer(precision=...) says in which the model computes.
        config: Values that replace those in config.json.

    Raises:
        CheckpointError: The folder holds no safetensors files, or broken ones.
        ModelError: The weights are quantized, don't fit, or can't be converted slice by slice.
    """
    files = open_folder(Path(folder))
    settings = AutoConfig.from_pretrained(folder, local_files_only=True, **config)
    if getattr(settings, "quantization_config", None) is not None:
        raise ModelError(
            f"{folder} holds quantized weights, which can't be trained. Save the model dequantized."
        )
    with torch.device("meta"):
        build = getattr(kind, "from_config", None) or kind._from_config
        model: PreTrainedModel = build(settings, dtype=dtype)
    stored = {name: tensor for file in files for name, tensor in file.tensors.items()}
    mapped = map_tensors(model, stored)
    _warn_of_difference(model, mapped.tensors, mapped.unexpected, folder)
    if model.can_generate() and (Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    vars(model)["weight_source"] = PretrainedWeights(files=files, tensors=mapped.tensors)
    return model


def _warn_of_difference(
    model: PreTrainedModel,
    tensors: Mapping[str, StoredTensor],
    unexpected: Sequence[str],
    folder: str | Path,
) -> None:
    held = {
        id(value) for name, value in model.state_dict(keep_vars=True).items() if name in tensors
    }
    missing = [name for name, value in model.named_parameters() if id(value) not in held]
    if missing:
        warnings.warn(
            f"{folder} lacks {missing}, which {type(model).__name__} has: they are drawn anew.",
            stacklevel=3,
        )
    # Buffers that older versions saved, and what the family itself ignores.
    ignored = {r"inv_freq$", r"position_ids$", *(model._keys_to_ignore_on_load_unexpected or ())}
    useless = [name for name in unexpected if not re.search("|".join(ignored), name)]
    if useless:
        warnings.warn(f"{type(model).__name__} has no use for {useless}.", stacklevel=3)
