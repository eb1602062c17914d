"""Add PEFT's adapters to a model whose weights are read later: new ones, or those of a folder.

An adapter's folder names its base. If that is on this machine, as a folder or in Hugging Face's
cache, values of its weights are compared with those that the model will have.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import PreTrainedModel

from lightning_hetero.core.errors import CheckpointError, ModelError
from lightning_hetero.models.huggingface.pretrained import load_pretrained
from lightning_hetero.models.stored import StoredTensor

_LOOKED_AT = 64
"""Number of values, at the start of each weight, that are compared."""


def add_adapters(model: PreTrainedModel, config: Any) -> Any:
    """Return PEFT's model around one on the meta device, with adapters that are drawn on the CPU.

    Like `peft.get_peft_model`, which would leave the adapters on the meta device without values.

    Args:
        model: What `load_pretrained` returned; its own weights are frozen.
        config: PEFT's config, such as a `LoraConfig`; or the folder of an adapter, to train it on.

    Raises:
        ModelError: The adapters' initial values depend on weights, or the folder's adapters don't
            fit the model or were trained with other weights.
    """
    import peft

    folder = config if isinstance(config, str | Path) else None
    if folder is not None:
        config = peft.PeftConfig.from_pretrained(str(folder))
        config.inference_mode = False
    options = {name: getattr(config, name, None) for name in ("use_dora", "modules_to_save")}
    init = getattr(config, "init_lora_weights", True)
    if isinstance(init, str) and init != "gaussian":
        options["init_lora_weights"] = init
    if any(options.values()):
        given = {name: value for name, value in options.items() if value}
        raise ModelError(
            f"Adapters with {given} begin with values of weights, which are read only when the run "
            "starts. Leave these options out, or load the model whole with from_pretrained."
        )
    with _on_cpu_without_values(model):
        if folder is None:
            adapted = peft.get_peft_model(model, config)
        else:
            adapted = _with_stored(model, config, folder)
    source = vars(model)["weight_source"]
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    before = {name: name.replace(".base_layer", "") for name in names}
    tensors = {n: source.tensors[own] for n, own in before.items() if own in source.tensors}
    vars(model)["weight_source"] = replace(source, tensors=tensors)
    return adapted


def _with_stored(model: PreTrainedModel, config: Any, folder: str | Path) -> Any:
    """Return PEFT's model with the adapters of a folder; ModelError if they don't fit."""
    import peft

    base = config.base_model_name_or_path or "another model"
    _check_base(model, config, folder)
    try:
        adapted = peft.get_peft_model(model, config)
        stored = peft.load_peft_weights(str(folder), device="cpu")
        result: Any = peft.set_peft_model_state_dict(adapted, stored)
    except (RuntimeError, ValueError) as error:  # They have other sizes or modules.
        text = " ".join(" ".join(str(error).splitlines()[:2]).split())
    else:
        trained = {name for name, item in adapted.named_parameters() if item.requires_grad}
        others = sorted({*trained.intersection(result.missing_keys), *result.unexpected_keys})
        if not others:
            return adapted
        text = f"{others[:3]} and {max(len(others) - 3, 0)} more are only in one of them."
    raise ModelError(
        f"The adapter in {folder} was trained on {base}, and doesn't fit "
        f"this {type(model).__name__}: {text} Read the model that it was trained on."
    )


def _check_base(model: PreTrainedModel, config: Any, folder: str | Path) -> None:
    """Raise ModelError if the base of a folder's adapter is on this machine and differs.

    If it isn't here and has another name, `peft.get_peft_model` warns.
    """
    base = config.base_model_name_or_path
    other = base and _weights_of_base(base, config.revision, model)
    if not other:
        return
    for name, mine in _stored_by(model).items():
        if name in other and _differ(mine, other[name]):
            raise ModelError(
                f"The adapter in {folder} was trained on {base}, where {name} has other values "
                f"than in {model.name_or_path}. Read the model that it was trained on; if it is "
                "meant for this one, write that as base_model_name_or_path into its "
                "adapter_config.json."
            )
    config.base_model_name_or_path = model.name_or_path


def _weights_of_base(
    base: str, revision: str | None, model: PreTrainedModel
) -> dict[str, StoredTensor] | None:
    """Return the stored weights of an adapter's base by their names in a model of that class.

    None if the base isn't on this machine, or isn't such a model.
    """
    found = base
    if not Path(base).is_dir():
        try:
            found = snapshot_download(base, revision=revision, local_files_only=True)
        except (OSError, ValueError):  # Not in the cache, or no name on the hub.
            return None
    with warnings.catch_warnings(), suppress(CheckpointError, ModelError, OSError, ValueError):
        warnings.simplefilter("ignore")
        return _stored_by(load_pretrained(found, type(model)))
    return None


def _stored_by(model: PreTrainedModel) -> dict[str, StoredTensor]:
    """Return what a model reads from its folder, except weights that are quantized there."""
    found: dict[str, StoredTensor] = dict(vars(model)["weight_source"].tensors)
    for name, parameter in model.named_parameters():
        stored = getattr(getattr(parameter, "whole_reader", None), "stored", {})
        if list(stored) == ["weight"]:
            found[name] = stored["weight"]
    return found


def _differ(mine: StoredTensor, other: StoredTensor) -> bool:
    """Whether two stored tensors differ by more than rounding; only their first values are read.

    Tensors of different shapes, or of integers, such as quantized weights, can't be compared.
    """
    if mine.shape != other.shape or 0 in mine.shape:
        return False
    box = (*((0, 1) for _ in mine.shape[:-1]), *((0, min(n, _LOOKED_AT)) for n in mine.shape[-1:]))
    values = [mine.read(box), other.read(box)]
    kinds = {item.dtype for item in values}
    coarse = list(kinds - {torch.float32} or kinds)
    if len(coarse) > 1 or not all(kind.is_floating_point for kind in kinds):
        return False
    return not torch.equal(*(item.to(coarse[0]) for item in values))


@contextmanager
def _on_cpu_without_values(model: nn.Module) -> Iterator[None]:
    """Put CPU tensors that take no memory in place of parameters on the meta device."""
    before = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_meta
    ]
    for module, name, parameter in before:
        empty = torch.empty(1, dtype=parameter.dtype).expand(parameter.shape)
        kind = type(parameter)
        stand_in = torch.Tensor._make_subclass(kind, empty, False)
        vars(stand_in).update(vars(parameter))
        module._parameters[name] = stand_in
    try:
        yield
    finally:
        for module, name, parameter in before:
            parameter.requires_grad = False
            module._parameters[name] = parameter
