"""Decide where in a folder's files each parameter of a Hugging Face model lies.

Transformers renames what older versions saved, and converts it: a family's experts, saved one by
one, are used as one tensor. Its own tables say how; here their operations are applied to
descriptions of the stored tensors, so that a slice of the result can be read by itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from lightning_hetero.core.errors import ModelError
from lightning_hetero.models.stored import (
    JoinedTensor,
    PieceOfTensor,
    StackedTensor,
    StoredTensor,
    TransposedTensor,
)

__all__ = ["MappedTensors", "map_tensors"]


@dataclass(frozen=True, kw_only=True)
class MappedTensors:
    """What a folder holds of a model."""

    tensors: Mapping[str, StoredTensor]
    """By the model's names."""
    unexpected: tuple[str, ...]
    """Names in the files that the model has no use for."""


@dataclass
class _Conversion:
    """What one converter makes of one target's sources."""

    converter: WeightConverter
    sources: dict[str, list[StoredTensor]] = field(default_factory=dict)
    """By the pattern that matched, in natural order."""


def map_tensors(model: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> MappedTensors:
    """Apply transformers' renaming and conversion to the names in a folder.

    Raises:
        ModelError: A parameter is converted by an operation that can't be read in part, or comes
            out in another shape than the model's.
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
        tensors |= _convert(name, conversion, tuple(state[name].shape))
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != tuple(state[name].shape):
            raise ModelError(
                f"{name} has shape {tuple(state[name].shape)} in the model but {tensor.shape} in "
                "the files. Take the config that was saved with them."
            )
    return MappedTensors(tensors=tensors, unexpected=tuple(unexpected))


def _convert(name: str, item: _Conversion, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
    """Return the targets of a conversion, of which `name` is the first."""
    values: dict[str, list[StoredTensor]] = item.sources
    targets = list(item.converter.target_patterns)
    for operation in item.converter.operations:
        values = _apply(operation, values, item.converter, name, shape)
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
    shape: tuple[int, ...],
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
        if type(operation) is Transpose:
            if operation.check_dims and tuple(whole.shape) == shape:
                return values
            return {pattern: [TransposedTensor(whole, (operation.dim0, operation.dim1))]}
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
