"""Build a pretrained Hugging Face model whose weights are read slice by slice, and write folders.

When transformers loads a folder, it renames and converts stored tensors: for example, experts that
were saved one by one become one tensor. Here the operations in transformers' own tables are applied
to descriptions of the stored tensors, so that any slice of a result can be read alone.

A trained model is written from a checkpoint file, which is memory-mapped, so at most the weights of
one written file are in memory. A module that is whole after `fit` (`whole_after_run`) can also use
its model's own `save_pretrained`.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from lightning_hetero.core.errors import CheckpointError, ModelError
from lightning_hetero.models.huggingface.quantized import Quantizer
from lightning_hetero.models.stored import (
    Box,
    JoinedTensor,
    PieceOfTensor,
    SafetensorsFile,
    StackedTensor,
    StoredTensor,
    open_folder,
)


@dataclass(frozen=True, kw_only=True)
class PretrainedWeights:
    """The stored weights of a model; `HeteroStrategy` reads each rank's slices from it."""

    files: Sequence[SafetensorsFile]
    tensors: Mapping[str, StoredTensor]
    """Stored tensors by the names of the model's parameters and buffers."""

    @property
    def num_bytes_read(self) -> int:
        """Bytes of tensors read so far, in this process."""
        return sum(file.num_bytes_read for file in self.files)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of one tensor, on the CPU, in the file's dtype."""
        return self.tensors[name].read(box)


def load_pretrained(
    folder: str | Path,
    kind: Any = AutoModelForCausalLM,
    *,
    dtype: torch.dtype = torch.float32,
    quantization_config: Any = None,
    **config: Any,
) -> PreTrainedModel:
    """Return a model on the meta device whose weights `HeteroStrategy` reads slice by slice.

    Each rank reads the byte ranges of the slices that it owns; together they read the folder once.
    Parameters that the folder lacks, such as a new head, are drawn by the model's own
    initialisation, with a warning. Unlike with `from_pretrained` the model is in training mode.

    Args:
        folder: A local folder with config.json and safetensors files, also sharded ones.
        kind: Class of the model: one of transformers' AutoModel classes, or the model's own.
        dtype: Dtype of the weights; Trainer(precision=...) sets the dtype of computations.
        quantization_config: A `BitsAndBytesConfig` or `TorchAoConfig`, by which linear weights are
            quantized when they are read. A folder of quantized weights needs none. Such weights
            are frozen: train adapters beside them (`add_adapters`).
        config: Values that replace those in config.json.

    Raises:
        CheckpointError: The folder has no safetensors files, or broken ones.
        ModelError: The weights don't fit, can't be converted slice by slice, or are quantized by
            another library.
    """
    files = open_folder(Path(folder))
    settings = AutoConfig.from_pretrained(folder, local_files_only=True, **config)
    stored_config = getattr(settings, "quantization_config", None)
    with torch.device("meta"):
        build = getattr(kind, "from_config", None) or kind._from_config
        model: PreTrainedModel = build(settings, dtype=dtype)
    stored = {name: tensor for file in files for name, tensor in file.tensors.items()}
    how = quantization_config if stored_config is None else stored_config
    if how is not None:
        quantizer = Quantizer(model, how, is_stored=stored_config is not None)
        metadata = {key: text for file in files for key, text in file.metadata.items()}
        stored = quantizer.take(stored, metadata, dtype)
    tensors, unexpected = _map_tensors(model, stored)
    _warn_of_difference(model, tensors, unexpected, folder)
    if model.can_generate() and (Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    vars(model)["weight_source"] = PretrainedWeights(files=files, tensors=tensors)
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
    missing = [
        name
        for name, value in model.named_parameters()
        if id(value) not in held and not hasattr(value, "whole_reader")
    ]
    if missing:
        warnings.warn(
            f"{folder} lacks {missing}, which {type(model).__name__} has: they are drawn anew.",
            stacklevel=3,
        )
    # Buffers that older versions saved, and names that the model class itself ignores.
    ignored = {r"inv_freq$", r"position_ids$", *(model._keys_to_ignore_on_load_unexpected or ())}
    useless = [name for name in unexpected if not re.search("|".join(ignored), name)]
    if useless:
        warnings.warn(f"{type(model).__name__} has no use for {useless}.", stacklevel=3)


@dataclass
class _Conversion:
    """A conversion, and the stored tensors that it converts."""

    converter: WeightConverter
    sources: dict[str, list[StoredTensor]] = field(default_factory=dict)
    """Stored tensors, in natural order of their names, by the source pattern that they match."""


def _map_tensors(
    model: PreTrainedModel, stored: Mapping[str, StoredTensor]
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Apply transformers' renaming and conversion to the names in a folder.

    Returns:
        The tensors by the model's names, and the stored names that the model doesn't use.

    Raises:
        ModelError: A parameter is converted by an operation whose result can't be read in part, or
            has another shape than in the model.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
    converters = [item for item in transforms if isinstance(item, WeightConverter)]
    by_pattern = {pattern: item for item in converters for pattern in item.source_patterns}
    state = model.state_dict()
    prefix = model.base_model_prefix
    tensors: dict[str, StoredTensor] = {}
    conversions: dict[str, _Conversion] = {}
    unexpected: list[str] = []
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        if name not in state:
            unexpected.append(key)
        elif pattern is None:
            tensors[name] = stored[key]
        else:
            found = conversions.setdefault(name, _Conversion(by_pattern[pattern]))
            found.sources.setdefault(pattern, []).append(stored[key])
    for name, conversion in conversions.items():
        tensors |= _convert(name, conversion)
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != tuple(state[name].shape):
            raise ModelError(
                f"{name} has shape {tuple(state[name].shape)} in the model but {tensor.shape} in "
                "the files. Take the config that was saved with them."
            )
    return tensors, unexpected


def _convert(name: str, item: _Conversion) -> dict[str, StoredTensor]:
    """Return a conversion's results by the model's names, of which `name` is the first."""
    values: dict[str, list[StoredTensor]] = item.sources
    targets = list(item.converter.target_patterns)
    for operation in item.converter.operations:
        values = _apply(operation, values, item.converter, name)
    if len(values) > 1 and len(values) == len(targets):
        return {name.replace(targets[0], target): values[target][0] for target in targets}
    (tensors,) = values.values()
    (tensor,) = tensors
    return {name: tensor}


def _apply(
    operation: Any,
    values: dict[str, list[StoredTensor]],
    converter: WeightConverter,
    name: str,
) -> dict[str, list[StoredTensor]]:
    targets = list(converter.target_patterns)
    if type(operation) is MergeModulelist:
        return {
            pattern: [StackedTensor(tuple(parts), operation.dim)]
            for pattern, parts in values.items()
        }
    if type(operation) is Concatenate and len(targets) == 1:
        ordered = [values[pattern] for pattern in converter.source_patterns if pattern in values]
        parts = tuple(part for parts in ordered for part in parts)
        return {targets[0]: [JoinedTensor(parts, operation.dim)]}
    if len(values) == 1:
        (pattern,) = values
        whole = values[pattern][0]
        if type(operation) is Chunk and operation.num_shards_attribute is None:
            length = whole.shape[operation.dim]
            size = -(-length // len(targets))
            return {
                target: [PieceOfTensor(whole, operation.dim, i * size, min((i + 1) * size, length))]
                for i, target in enumerate(targets)
            }
    raise ModelError(
        f"Transformers makes {name} from {sorted(converter.source_patterns)} by "
        f"{type(operation).__name__}, which can't be done slice by slice. Load the model once with "
        "from_pretrained, and train that, or what save_pretrained(save_original_format=False) "
        "writes of it."
    )


def export_pretrained(
    checkpoint: str | Path,
    model: PreTrainedModel,
    folder: str | Path,
    *,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write the model inside a Lightning checkpoint as `save_pretrained` does.

    `lightning-hetero checkpoint export` makes Lightning checkpoints of layer-wise ones.

    Args:
        checkpoint: The checkpoint file.
        model: A model like the one that was trained; it may be on the meta device, as in
            `with torch.device("meta"): AutoModelForCausalLM.from_config(config)`.
        folder: The folder to write.
        max_shard_size: Size of a file, in bytes or with a unit ("2GB").

    Raises:
        CheckpointError: The file can't be read, or holds no such model, or several.
    """
    try:
        state = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)
        state = state["state_dict"]
    except (OSError, RuntimeError, LookupError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"Can't read {checkpoint} as a Lightning checkpoint: {error}. Make one of a layer-wise "
            "checkpoint with `lightning-hetero checkpoint export`."
        ) from error
    names = list(model.state_dict())
    prefix = _find_prefix(state, names, type(model).__name__, checkpoint)
    own = {name: state[prefix + name] for name in names}
    model.save_pretrained(folder, state_dict=own, max_shard_size=max_shard_size)


def _find_prefix(
    state: Mapping[str, Any], names: list[str], kind: str, checkpoint: str | Path
) -> str:
    """Return the prefix of a model's names in a LightningModule's state, such as "model."."""
    prefixes = [key.removesuffix(names[0]) for key in state if key.endswith(names[0])]
    found = [prefix for prefix in prefixes if all(prefix + name in state for name in names)]
    if len(found) != 1:
        raise CheckpointError(
            f"{checkpoint} holds {len(found)} modules with the {len(names)} parameters of {kind} "
            f"(its keys begin with {sorted({key.partition('.')[0] for key in state})}). Give a "
            "model with the config that was trained."
        )
    return found[0]
