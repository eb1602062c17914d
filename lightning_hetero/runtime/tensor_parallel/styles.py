"""Tensor-parallel plans: name patterns of modules and parameters, and the styles that shard them.

A plan maps name patterns to styles. The first of these is used: the strategy's option, a Hugging
Face model's own `_tp_plan` (with a `*` in some pattern), a module's attribute `tp_plan`, a known
plan for the model's family. Patterns match whole names or their ends (`self_attn.q_proj`), a
`*` matches one component; of several patterns that match a name the last one is used.

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
vocab_loss                     a head whose logits stay sharded until something needs them whole
moe_tp_experts                 module of expert weights that have styles of their own
replicated_with_grad_allreduce whole weights used with shards of activations (a norm of each head)
local_sizes:a,b                attributes that count sharded features, local while the module runs
replicate, local_params        nothing
=============================  ====================================================================
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from torch import nn

from lightning_hetero.core.errors import ConfigurationError, ModelError

__all__ = ["COLUMNS", "ROWS", "Rule", "TPStyle", "rule_of_module", "rules_of", "unwrapped"]

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
    VOCAB_LOSS = "vocab_loss"
    EXPERTS = "moe_tp_experts"
    PARTIAL = "replicated_with_grad_allreduce"
    LOCAL_SIZES = "local_sizes"
    REPLICATE = "replicate"
    DROPOUT = "dropout of a shard"
    """Of the input of a row-parallel adapter: no style that a plan can name."""
    DORA = "dora"
    """A module that scales a sharded layer's outputs: no style that a plan can name."""


COLUMNS = (TPStyle.COLWISE, TPStyle.GATHERED, TPStyle.VOCAB_LOSS, TPStyle.VOCAB)
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
        """Read a style with its argument, such as "packed_colwise:3".

        Raises:
            ConfigurationError: It is unknown.
        """
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
