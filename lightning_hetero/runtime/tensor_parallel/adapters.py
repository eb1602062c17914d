"""Shard PEFT's adapters with the layers that they adapt.

=================  ==================================  ==================================
the layer's style  what is cut with it                 what every rank holds whole
=================  ==================================  ==================================
column-parallel    `lora_B`, the scales of outputs     `lora_A`, the scales of inputs
row-parallel       `lora_A`, the scales of inputs      `lora_B`, the scales of outputs
embedding          nothing                             both matrices
=================  ==================================  ==================================

A column-parallel `lora_B` sums the gradient of its input, of LoRA's rank, over the group; a
row-parallel `lora_A` sums its output. So the other matrix gets the same gradient on all ranks. The
scales of outputs are IA3's and DoRA's magnitudes. Layers of `modules_to_save` are sharded like
those that they replace. All other adapters of sharded layers are refused by name.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_hetero.core.errors import ModelError
from lightning_hetero.runtime.tensor_parallel.styles import COLUMNS, ROWS, Rule, TPStyle, unwrapped

__all__ = ["is_adapter", "layer_of", "with_adapters"]

_PARTS = re.compile(r"\.(lora_\w+|ia3_l)\.[^.]+(?=\.|$)")
_LORA = {
    f"peft.tuners.lora.{name}"
    for name in (
        *("layer.Linear", "layer.Embedding"),
        # Of quantized layers, which are refused by what they are.
        *("bnb.Linear4bit", "bnb.Linear8bitLt", "torchao.TorchaoLoraLinear"),
    )
}
_IA3 = {"peft.tuners.ia3.layer.Linear"}
_WHOLE_KEYS = ("PREFIX_TUNING", "CARTRIDGE")
"""Adapters that put keys and values of all heads into every attention."""


def layer_of(name: str) -> str:
    """Return the name that a module or parameter's layer had before PEFT wrapped it.

    That is `…q_proj` for `…q_proj.base_layer` and for `…q_proj.lora_A.default`.
    """
    return _PARTS.sub("", unwrapped(name))


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter beside a layer."""
    return _PARTS.search(name) is not None


def with_adapters(root: nn.Module, rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return the rules with those of adapters, and without those of PEFT's wrappers.

    Raises:
        ModelError: Adapters of another kind are on a sharded layer.
    """
    found = dict(rules)
    for name, module in root.named_modules():
        _check_prompts(module)
        bases = {base.__name__ for base in type(module).__mro__}
        wraps = bases & {"BaseTunerLayer", "AuxiliaryTrainingWrapper"}
        rule = found.get(name) or rules.get(f"{name}.base_layer.weight")
        if not wraps or rule is None or rule.style is TPStyle.REPLICATE:
            continue
        found.pop(name, None)
        if type(module).__name__ != "ModulesToSaveWrapper":
            found |= {f"{name}.{part}": item for part, item in _parts_of(name, module, rule)}
    return found


def _check_prompts(module: nn.Module) -> None:
    configs = vars(module).get("_peft_config")  # Of adapters that wrap no layers.
    for config in configs.values() if isinstance(configs, Mapping) else ():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind in _WHOLE_KEYS:
            raise ModelError(
                f"Adapters of type {kind} add keys and values of all heads to each layer, and "
                "tensor parallelism shards heads. Use LoRA or IA3, or a plan of degree 1."
            )


def _parts_of(name: str, module: Any, rule: Rule) -> Iterator[tuple[str, Rule]]:
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    if kind in _LORA and rule.style in (*COLUMNS, *ROWS, *_EMBEDDINGS):
        variants = {type(item).__name__ for item in module.lora_variant.values()}
        if not kind.endswith("Embedding"):
            variants -= {"DoraLinearVariant"}
            yield from _parts_of_lora(module, rule)
        if not variants:
            return
        kind = ", ".join(sorted(variants))
    elif kind in _IA3 and rule.style in (*COLUMNS, *ROWS):
        if (rule.style in ROWS) is module.is_feedforward and rule.style in _CUT_OUTSIDE:
            yield from ((f"ia3_l.{adapter}", rule) for adapter in module.ia3_l)
        return
    raise ModelError(
        f"Tensor parallelism shards {name}, whose adapter is a {kind}. It can shard LoRA and DoRA "
        "of linear layers, LoRA of embeddings, IA3 of linear layers and modules_to_save. Use one "
        "of these, or a plan of degree 1."
    )


_EMBEDDINGS = (TPStyle.EMBEDDING, TPStyle.EMBEDDING_FEATURES, TPStyle.VOCAB)
_CUT_OUTSIDE = (TPStyle.COLWISE, TPStyle.ROWWISE)
"""Styles with shards of outputs, or of inputs, outside of the layer."""


def _parts_of_lora(module: Any, rule: Rule) -> Iterator[tuple[str, Rule]]:
    cut = "lora_A" if rule.style in ROWS else "lora_B"
    for adapter in module.lora_A:
        yield f"{cut}.{adapter}", rule
        if rule.style is TPStyle.ROWWISE and isinstance(module.lora_dropout[adapter], nn.Dropout):
            yield f"lora_dropout.{adapter}", replace(rule, style=TPStyle.DROPOUT)
    for adapter in module.lora_magnitude_vector:
        yield f"lora_magnitude_vector.{adapter}", replace(rule, style=TPStyle.DORA)
        if rule.style is TPStyle.COLWISE:
            yield f"lora_magnitude_vector.{adapter}.weight", rule
