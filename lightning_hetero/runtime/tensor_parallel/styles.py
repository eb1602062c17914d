"""Tensor-parallel plans: name patterns of modules and parameters, and the styles that shard them.

A plan maps name patterns to styles. It comes from the first of these that there is: the strategy's
option `tp_plan`, a Hugging Face model's own `_tp_plan` (with a `*` in some pattern), a module's
attribute `tp_plan`, a known plan for the model's family. A pattern matches a whole name or the end
of one (`self_attn.q_proj`), and `*` matches one component. If several patterns match, the last one
counts.

=============================  ====================================================================
style                          what happens to the module (or the bare parameter) of that name
=============================  ====================================================================
colwise                        output features sharded; the output stays sharded
packed_colwise:n               the same for n equal blocks side by side (fused projections; n = 2)
colwise_gather_output          output features sharded, the output gathered (also `colwise_rep`)
rowwise                        input features sharded, the input already is; outputs summed
packed_rowwise:n               the same for n equal blocks
rowwise_split_input            the same, the input is whole and is split first (`rowwise_rep`)
embedding_rowwise              token ids sharded
embedding_colwise              hidden features sharded, gathered
vocab                          an embedding's token ids or a head's outputs sharded, whole outside
moe_tp_experts                 module of expert weights that have styles of their own
replicated_with_grad_allreduce whole weights used with shards of activations (a norm of each head)
local_sizes:a,b                attributes that count sharded features, local while the module runs
replicate, local_params        nothing
=============================  ====================================================================

PEFT's adapters are sharded with the layers that they adapt:

=================  ==================================  ==================================
the layer's style  what is cut with it                 what every rank holds whole
=================  ==================================  ==================================
column-parallel    `lora_B`, the scales of outputs     `lora_A`, the scales of inputs
row-parallel       `lora_A`, the scales of inputs      `lora_B`, the scales of outputs
embedding          nothing                             both matrices
=================  ==================================  ==================================

A column-parallel `lora_B` sums the gradient of its input over the group, a row-parallel `lora_A`
sums its output: for each token as many numbers as LoRA's rank. So the other matrix gets the same
gradient on all ranks. "Scales of outputs" are IA3's, and DoRA's magnitudes. Layers of
`modules_to_save` are sharded like those that they replace. All other adapters of sharded layers are
refused by name.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from torch import nn

from lightning_hetero.core.errors import ConfigurationError, ModelError

_BERT = {
    "word_embeddings": "embedding_rowwise",
    "layer.*.attention.self.query": "colwise",
    "layer.*.attention.self.key": "colwise",
    "layer.*.attention.self.value": "colwise",
    "layer.*.attention.output.dense": "rowwise",
    "layer.*.intermediate.dense": "colwise",
    "layer.*.output.dense": "rowwise",
}

_KNOWN_PLANS: Mapping[str, Mapping[str, str]] = {
    "bert": _BERT,
    "roberta": _BERT,
    "gpt2": {
        "wte": "embedding_rowwise",
        # Query, key and value are three blocks of one weight, each sharded by heads.
        "h.*.attn.c_attn": "packed_colwise:3",
        "h.*.attn": "local_sizes:split_size",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
}
"""By `config.model_type`, for models with any head: families without a plan in transformers."""


class TPStyle(StrEnum):
    """Ways in which tensor parallelism shards a module."""

    COLWISE = "colwise"
    GATHERED = "colwise_gather_output"
    ROWWISE = "rowwise"
    SPLIT = "rowwise_split_input"
    EMBEDDING = "embedding_rowwise"
    EMBEDDING_FEATURES = "embedding_colwise"
    VOCAB = "vocab"
    EXPERTS = "moe_tp_experts"
    PARTIAL = "replicated_with_grad_allreduce"
    LOCAL_SIZES = "local_sizes"
    REPLICATE = "replicate"
    DROPOUT = "dropout of a shard"
    """Of the input of a row-parallel adapter: no style that a plan can name."""
    DORA = "dora"
    """A module that scales a sharded layer's outputs: no style that a plan can name."""


COLUMNS = (TPStyle.COLWISE, TPStyle.GATHERED, TPStyle.VOCAB)
"""Styles of linear layers whose output features are sharded."""
ROWS = (TPStyle.ROWWISE, TPStyle.SPLIT)
"""Styles of linear layers whose input features are sharded."""
_INTERNAL = (TPStyle.DROPOUT, TPStyle.DORA)
_WRAPPERS = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")


def unwrapped(name: str) -> str:
    """Return a module or parameter's name without the components that PEFT's wrappers add."""
    return _WRAPPERS.sub("", name)


_ALIASES = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "packed_colwise": "colwise:2",
    "packed_rowwise": "rowwise:2",
    "replicated": "replicate",
    "local_params": "replicate",
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The style of all names that match a pattern."""

    pattern: str
    style: TPStyle
    blocks: int = 1
    attributes: tuple[str, ...] = ()

    @classmethod
    def parse(cls, pattern: str, text: str) -> "Rule":
        """Read a style with its argument, such as "packed_colwise:3"."""
        name, _, argument = text.partition(":")
        alias, _, default = _ALIASES.get(name, name).partition(":")
        try:
            style = TPStyle(alias)
            if style in _INTERNAL:
                raise ValueError(name)
            if style is TPStyle.LOCAL_SIZES:
                return cls(pattern=pattern, style=style, attributes=tuple(argument.split(",")))
            return cls(pattern=pattern, style=style, blocks=int(argument or default or 1))
        except ValueError:
            known = sorted({*TPStyle, *_ALIASES} - {*_INTERNAL})
            raise ConfigurationError(
                f"The tensor-parallel plan says {text!r} for {pattern!r}, which isn't supported. "
                f"Styles: {', '.join(known)}. Give one of them in HeteroStrategy(tp_plan=...), or "
                "use pipelines of tensor-parallel degree 1."
            ) from None

    def matches(self, name: str) -> bool:
        """Whether the pattern matches a name or its last components, whether wrapped or not."""
        expression = re.escape(self.pattern).replace(r"\*", r"[^.]+")
        pattern = re.compile(rf"(?:.*\.)?{expression}")
        return any(map(pattern.fullmatch, (name, unwrapped(name))))


def rules_of(root: nn.Module, option: Mapping[str, str] | None) -> dict[str, Rule]:
    """Return the rules of the modules and parameters that a plan names, by name.

    Raises:
        ModelError: There is no plan.
        ConfigurationError: A style is unknown, or a pattern of the option matches nothing.
    """
    rules: dict[str, Rule] = {}
    for prefix, module, plan in _plans(root, option):
        names = [name for name, _ in module.named_modules() if name]
        names += [
            f"{owner_name}.{attribute}" if owner_name else attribute
            for owner_name, owner in module.named_modules()
            for attribute, parameter in owner._parameters.items()
            if parameter is not None
        ]
        used = False
        for rule in (Rule.parse(pattern, style) for pattern, style in plan.items()):
            matched = [name for name in names if rule.matches(name)]
            used = used or bool(matched)
            if option is not None and not matched:
                raise ConfigurationError(
                    f"Pattern {rule.pattern!r} of tp_plan names no module or parameter of "
                    f"{type(root).__name__}. Some names there: {names[:4]}."
                )
            rules |= {f"{prefix}.{name}" if prefix else name: rule for name in matched}
        if not used:
            raise _no_plan(root)
    return rules


def _plans(
    root: nn.Module, option: Mapping[str, str] | None
) -> list[tuple[str, nn.Module, Mapping[str, str]]]:
    """Return (name, module, plan) of the outermost modules that have one."""
    if option is not None:
        return [("", root, option)]
    plans: list[tuple[str, nn.Module, Mapping[str, str]]] = []
    for name, module in root.named_modules():
        covered = any(name == p or name.startswith(f"{p}.") or not p for p, _, _ in plans)
        plan = None if covered else _own_plan(module)
        if plan:
            plans.append((name, module, plan))
    if not plans:
        raise _no_plan(root)
    return plans


def _own_plan(module: nn.Module) -> Mapping[str, str] | None:
    family = getattr(getattr(module, "config", None), "model_type", None)
    hugging_face, own = getattr(module, "_tp_plan", None), getattr(module, "tp_plan", None)
    # Hugging Face's is of a head alone if it has no `*`: the family has no plan for its layers.
    if isinstance(hugging_face, Mapping) and any("*" in str(pattern) for pattern in hugging_face):
        return hugging_face
    if isinstance(own, Mapping) and own:
        return own
    return None if family is None else _KNOWN_PLANS.get(family)


def _no_plan(root: nn.Module) -> ModelError:
    return ModelError(
        f"The plan uses tensor parallelism but nothing says how {type(root).__name__} is sharded. "
        'Give HeteroStrategy(tp_plan={"layers.*.mlp.up": "colwise", ...}), an attribute tp_plan of '
        "the module, or a Hugging Face model whose family has a plan (most decoders, and "
        f"{', '.join(sorted(_KNOWN_PLANS))}); or use pipelines of tensor-parallel degree 1."
    )


def rule_of_module(styled: Mapping[str, Rule], name: str, module: nn.Module) -> Rule | None:
    """Return the rule of a module, or of its weight if only that is named; None without any."""
    rule = styled.get(name)
    if rule is None and isinstance(module, nn.Linear | nn.Embedding):
        rule = styled.get(f"{name}.weight" if name else "weight")
    return rule


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
