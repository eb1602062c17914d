"""Sizes of a model that is trained by adapters: a PEFT folder, or LoRA that is asked for."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from lightning_hetero.core.errors import ModelError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.reading import load_file, parse_json, show
from lightning_hetero.core.tuning.fine_tuning import QUANTIZATIONS, FineTuning

__all__ = ["DEFAULT_RANK", "load_model", "with_lora"]

DEFAULT_RANK = 16
"""Rank of the adapters that a quantized model is planned with if none is named."""
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_LAYER = re.compile(r"\.(\d+)\.")


def load_model(
    name_or_path: str | Path, *, quantize: str | None = None, lora_rank: int | None = None
) -> ModelSpec:
    """Return the sizes of a model, and of what trains of it.

    Args:
        name_or_path: What `ModelSpec.load` takes, or the folder of a PEFT adapter, which names its
            base model.
        quantize: A key of `QUANTIZATIONS` in which the layers' matrices are stored; None as the
            model says.
        lora_rank: Rank of LoRA adapters on all matrices; None takes those of the folder. Quantized
            weights don't train, so that they get adapters of `DEFAULT_RANK`.

    Raises:
        ModelError: There is no such model, or the adapter is for another base.
    """
    folder = Path(name_or_path)
    is_adapter = (folder / _CONFIG).is_file() and not (folder / "config.json").is_file()
    adapter = load_file(folder / _CONFIG, "adapter", ModelError, _parse) if is_adapter else None
    model = ModelSpec.load(name_or_path if adapter is None else _base_of(folder, adapter))
    if quantize is not None:
        how = FineTuning(stored_bits=QUANTIZATIONS[quantize], method=quantize.upper())
        model = replace(model, tuning=how)
    if lora_rank is None and adapter is not None:
        return _with_adapter(model, folder, adapter)
    if lora_rank is None and model.tuning is not None and not model.tuning.layer_params:
        lora_rank = DEFAULT_RANK
    return model if lora_rank is None else with_lora(model, lora_rank)


def with_lora(
    model: ModelSpec,
    rank: int,
    targets: str | Sequence[str] | None = None,
    *,
    has_magnitudes: bool = False,
) -> ModelSpec:
    """Return a model whose own weights are frozen, with LoRA adapters beside its matrices.

    Args:
        model: The model.
        rank: Rank of the adapters.
        targets: Names of matrices, or a regular expression of them; None means all.
        has_magnitudes: Whether each matrix also trains a value per output, as in DoRA.

    Raises:
        ModelError: The rank is below 1, or no matrix has such a name.
    """
    if rank < 1:
        raise ModelError(f"LoRA has rank {rank}; it must be 1 or more.")
    chosen = [item for item in model.matrices if targets is None or item.is_named_by(targets)]
    if not chosen:
        known = sorted({name for item in model.matrices for name in item.names})
        raise ModelError(f"No matrix of {model.name} is named {show(targets)}; known are {known}.")
    added = sum(rank * (item.num_inputs + item.num_outputs) for item in chosen)
    added += has_magnitudes * sum(item.num_outputs for item in chosen)
    read = {item.reads for item in chosen}
    spared = {item.reads: item.num_inputs for item in model.matrices if item.reads not in read}
    # Attention keeps its own output.
    spared.pop("attention", None)
    before = model.tuning or FineTuning(method="")
    return replace(
        model,
        tuning=replace(
            before,
            layer_params=added,
            added_params=added,
            spared_values=sum(spared.values()),
            method=f"{before.method} LoRA r {rank}".strip(),
        ),
    )


def _parse(text: str) -> Mapping[str, Any]:
    data = parse_json(text, "adapter", ModelError)
    if not isinstance(data, Mapping):
        raise ModelError(f"The adapter's config is {show(data)}; it must be a mapping.")
    return data


def _base_of(folder: Path, adapter: Mapping[str, Any]) -> str:
    """Return where the base model of an adapter is: a path is also tried beside the adapter."""
    base = adapter.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"{folder / _CONFIG} names no base_model_name_or_path. Write the folder or name of the "
            "model that the adapter was trained on there."
        )
    beside = folder / base
    return str(beside) if not Path(base).exists() and beside.is_dir() else base


def _with_adapter(model: ModelSpec, folder: Path, adapter: Mapping[str, Any]) -> ModelSpec:
    """Return a model with the parameters of a PEFT folder: those of its weights, else by config."""
    kind, rank = str(adapter.get("peft_type", "LORA")), adapter.get("r")
    is_lora, weights = kind == "LORA", folder / _WEIGHTS
    if is_lora and not isinstance(rank, int):
        raise ModelError(f"{folder / _CONFIG} has r {show(rank)}; it must be a whole number.")
    if not is_lora and not weights.is_file():
        raise ModelError(
            f"{folder} has an adapter of type {kind} without {_WEIGHTS}, so its size isn't known. "
            "Save the adapter's weights there."
        )
    before = model.tuning or FineTuning(method="")
    tuning = replace(before, method=f"{before.method} {kind}".strip())
    if isinstance(rank, int) and is_lora:
        targets = adapter.get("target_modules")
        names = None if targets in (None, "all-linear") else targets
        with_dora = bool(adapter.get("use_dora"))
        lora = with_lora(model, rank, names, has_magnitudes=with_dora).tuning
        assert lora is not None
        tuning = replace(lora, method=lora.method.replace("LoRA", "DoRA" if with_dora else "LoRA"))
    saved = " ".join(adapter.get("modules_to_save") or ())
    table = model.vocab_size * model.hidden_size
    tuning = replace(
        tuning,
        embedding_params=table * _is_embedding(saved),
        head_params=table * ("head" in saved),
    )
    tuning = _counted(tuning, model, weights) if weights.is_file() else tuning
    return replace(model, tuning=tuning)


def _counted(tuning: FineTuning, model: ModelSpec, path: Path) -> FineTuning:
    """Return fine-tuning with the parameters of stored adapters.

    Raises:
        ModelError: They are for other layers or matrices than the model has.
    """
    in_layers, outside = 0, {True: 0, False: 0}
    for name, shape in _shapes(path).items():
        layer = _LAYER.search(name)
        if layer is None:
            outside[_is_embedding(name)] += prod(shape)
            continue
        in_layers += prod(shape)
        _check(model, path, name, shape, int(layer[1]))
    per_layer = -(-in_layers // model.num_layers)
    return replace(
        tuning,
        layer_params=per_layer,
        added_params=per_layer,
        embedding_params=outside[True],
        head_params=outside[False],
    )


def _shapes(path: Path) -> dict[str, list[int]]:
    """Return the shapes in a safetensors file: a header's length, then the header, as JSON."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return {name: item["shape"] for name, item in header.items() if name != "__metadata__"}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, MemoryError) as error:
        raise ModelError(f"Can't read {path} as a safetensors file. Copy it again.") from error


def _check(model: ModelSpec, path: Path, name: str, shape: Sequence[int], layer: int) -> None:
    """Raise ModelError unless a LoRA matrix multiplies what its base matrix does."""
    found = re.search(r"(\w+)\.lora_A\.", name)
    fitting = [m for m in model.matrices if found is not None and found[1] in m.names]
    is_fitting = not fitting or shape[-1] in {item.num_inputs for item in fitting}
    if layer >= model.num_layers or not is_fitting:
        raise ModelError(
            f"{path} holds {name} of shape {list(shape)}, but {model.name} has {model.num_layers} "
            f"layers whose matrices take {sorted({item.num_inputs for item in fitting})} values: "
            "the adapter is for another base model. Name that in its adapter_config.json."
        )


def _is_embedding(name: str) -> bool:
    return any(word in name for word in ("embed", "wte", "wpe"))
