"""Read from a Hugging Face folder what it says about its model: sizes, stored format, what trains.

LoRA (Hu et al. 2021) adds adapters to frozen matrices; QLoRA (Dettmers et al. 2023) stores these in
4 bits, with scales for blocks of 64 values. Embedding, head and norms aren't quantized.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from lightning_hetero.core.errors import ModelError
from lightning_hetero.core.reading import readable
from lightning_hetero.core.texts import load_file, parse_json, show

DEFAULT_RANK = 16
"""Rank of the adapters that are assumed for a quantized model if no rank is given."""

QUANTIZATIONS: Mapping[str, float] = {
    "nf4": 4 + 32 / 64,
    "nf4-double": 4 + 8 / 64 + 32 / (64 * 256),
    "fp4": 4 + 32 / 64,
    "fp4-double": 4 + 8 / 64 + 32 / (64 * 256),
    "int4": 4 + 32 / 128,
    "int8": 8.0,
    "float8": 8.0,
}
"""Bits per weight, including the scales of its block: bitsandbytes' 4-bit formats with fp32 scales,
or with scales that are quantized themselves; torchao's int4 in groups of 128; 8 bits with a scale
for each row, which is negligible."""


@readable
class FineTuning:
    """Which parameters train, and how the others are stored.

    Raises:
        ModelError: A number is below 0, or more adapters are added than train.
    """

    layer_params: int = 0
    """Parameters of one layer that train."""
    added_params: int = 0
    """How many of these belong to adapters: they come on top of the layer's own parameters."""
    embedding_params: int = 0
    """Parameters before the first layer that train."""
    head_params: int = 0
    """Parameters after the last layer that train."""
    stored_bits: float | None = None
    """Bits per frozen weight of a layer's matrices; None if they have the dtype of computations."""
    method: str = "frozen weights"
    """Its name in summaries."""

    def __post_init__(self) -> None:
        sizes = self.added_params, self.embedding_params, self.head_params
        bits = 1.0 if self.stored_bits is None else self.stored_bits
        if min(sizes) < 0 or self.layer_params < self.added_params or not 0 < bits <= 64:
            raise ModelError(
                f"Fine-tuning has {self.layer_params} parameters a layer, {sizes} added, in the "
                f"embedding and in the head, in {bits} bits: numbers must be 0 or more, the first "
                "the largest of a layer's, bits above 0."
            )


def read_quantization(config: Mapping[str, Any], name: str) -> FineTuning | None:
    """Return how a Hugging Face config says weights are stored; None if it doesn't say.

    Raises:
        ModelError: The method isn't known.
    """
    found = config.get("quantization_config")
    if found is None:
        return None
    settings = found if isinstance(found, Mapping) else {}
    kind = _kind_of(settings)
    if kind in QUANTIZATIONS:
        size = re.search(r"group_size\W+([1-9]\d*)", str(settings.get("quant_type")))
        stored = 4 + 32 / int(size[1]) if kind == "int4" and size else QUANTIZATIONS[kind]
        return FineTuning(stored_bits=stored, method=kind.upper())
    bits, group = settings.get("bits"), settings.get("group_size")
    if type(bits) is type(group) is int and bits > 0:
        # GPTQ and AWQ: a 16-bit scale and a zero point for each group, or for each row.
        stored = bits + ((16 + bits) / group if group > 0 else 0.0)
        return FineTuning(stored_bits=stored, method=f"{kind.upper()} {bits}-bit")
    raise ModelError(
        f"{name} is quantized by {show(found)}, whose bytes aren't known. Known are "
        "bitsandbytes in 4 and 8 bits, torchao's int4, int8 and float8, GPTQ and AWQ."
    )


def _kind_of(config: Mapping[str, Any]) -> str:
    """Return the key of `QUANTIZATIONS`, else the method's name."""
    method = config.get("quant_method", "bitsandbytes")
    method = str(getattr(method, "value", method))
    if method == "bitsandbytes":
        double = "-double" if config.get("bnb_4bit_use_double_quant") else ""
        four = str(config.get("bnb_4bit_quant_type", "fp4")) + double
        eight = "int8" if config.get("load_in_8bit") else method
        return four if config.get("load_in_4bit") else eight
    if method == "torchao":
        name = re.search(r"int[48x]|float8", str(config.get("quant_type")), re.IGNORECASE)
        return name[0].lower().replace("x", "8") if name else method  # intx is stored as int8.
    return method


# Families with biases and learned positions; newer ones have neither.
_CLASSIC_FAMILIES = frozenset(
    {"bert", "roberta", "distilbert", "gpt2", "gpt_neo", "gpt_neox", "opt", "bloom", "gpt_bigcode"}
)
_INNER_SIZES = ("intermediate_size", "n_inner", "ffn_dim", "d_ff")


def sizes_of_config(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the fields of `ModelSpec` that a config gives.

    Raises:
        ModelError: A size is missing, or weights are stored in an unknown way.
    """
    quantization = read_quantization(config, name)
    nested = config.get("text_config")
    config = nested if isinstance(nested, Mapping) else config
    hidden = _first(config, "hidden_size", "n_embd", "d_model", name=name)
    heads = _first(config, "num_attention_heads", "n_head", "num_heads", name=name)
    family = str(config.get("model_type", ""))
    activation = config.get("hidden_act") or config.get("hidden_activation")
    classic = family in _CLASSIC_FAMILIES
    positions = config.get("max_position_embeddings") or config.get("n_positions") or 0
    inner = next((config[key] for key in _INNER_SIZES if config.get(key)), 4 * hidden)
    return {
        "num_layers": _first(config, "num_hidden_layers", "n_layer", "num_layers", name=name),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "intermediate_size": inner,
        "vocab_size": _first(config, "vocab_size", name=name),
        "gated_mlp": activation in ("silu", "swish") or family.startswith("gemma"),
        "tied_embeddings": bool(config.get("tie_word_embeddings", classic)),
        "biases": classic,
        "max_positions": positions if classic and family != "gpt_neox" else 0,
        "causal": family not in ("bert", "roberta", "distilbert", "modernbert"),
        "head_dim": config.get("head_dim"),
        "tuning": quantization,
    }


def _first(config: Mapping[str, Any], *keys: str, name: str) -> int:
    for key in keys:
        value = config.get(key)
        if type(value) is int:
            return value
        if value is not None:
            raise ModelError(
                f"The config of {name!r} has {key} {show(value)}; it must be a whole number."
            )
    raise ModelError(f"The config of {name!r} has none of {list(keys)}; it must have one.")


def cached_config(name: str) -> Path | None:
    """Return the `config.json` of the Hugging Face model of that name, or None if not cached."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
    except (ImportError, ValueError):  # The library is missing, or it isn't a model's name.
        return None
    return Path(found) if isinstance(found, str) else None


_ADAPTER = "adapter_config.json"
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
_SAME_AS = {"out_proj": "o_proj", "fc1": "up_proj", "fc2": "down_proj"}
_EMBEDDINGS, _HEADS = {"embed_tokens", "wte"}, {"lm_head"}
_UNCOUNTED = (
    *("use_dora", "rank_pattern", "layers_to_transform", "exclude_modules", "target_parameters"),
)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """LoRA of one rank, as asked for or as in the folder of a PEFT adapter."""

    rank: int
    """Rank of the adapters, 1 or more."""
    base: str = ""
    """Folder or name of the base model."""
    targets: frozenset[str] | None = None
    """Names of the matrices that have adapters; None means all."""
    saves_embedding: bool = False
    """Whether the embedding trains, too."""
    saves_head: bool = False
    """Whether the head trains, too."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ModelError(f"LoRA has rank {self.rank}; it must be 1 or more.")

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Return a folder's adapter; None if the folder has a model, or no adapter.

        Raises:
            ModelError: It isn't a LoRA of known size, or its base is missing.
        """
        if not _is_adapter(folder):
            return None
        return load_file(folder / _ADAPTER, "adapter", ModelError, cls._parse)

    @classmethod
    def _parse(cls, text: str) -> Self:
        data = parse_json(text, "adapter", ModelError)
        data = data if isinstance(data, Mapping) else {}
        base, rank = data.get("base_model_name_or_path"), data.get("r")
        if not isinstance(base, str) or not base or _is_adapter(Path(base)):
            raise ModelError(
                f"{_ADAPTER} has base_model_name_or_path {show(base)}. Write the folder or name of "
                "the model that the adapter was trained on there."
            )
        targets, saved = data.get("target_modules"), data.get("modules_to_save") or []
        lists = isinstance(targets, list) or targets == "all-linear", isinstance(saved, list)
        is_known = data.get("peft_type") == "LORA" and all(lists)
        names = set(map(str, saved))
        is_known &= not any(map(data.get, _UNCOUNTED)) and names <= _EMBEDDINGS | _HEADS
        if type(rank) is not int or not is_known:
            raise ModelError(
                f"{_ADAPTER} has peft_type {show(data.get('peft_type'))}, r {show(rank)}, "
                f"target_modules {show(targets)}, modules_to_save {show(saved)}. Sizes are known "
                "of LORA with a whole r, a list or 'all-linear', embedding and head saved, without "
                f"{', '.join(_UNCOUNTED)}. Plan its base with --model {base} --lora-rank instead."
            )
        chosen = frozenset(map(str, targets)) if isinstance(targets, list) else None
        outside = {"saves_embedding": bool(names & _EMBEDDINGS), "saves_head": "lm_head" in names}
        return cls(base=base, rank=rank, targets=chosen, **outside)

    def added_to(
        self, tuning: FineTuning | None, matrices: tuple[tuple[int, int], ...], table: int
    ) -> FineTuning:
        """Return what trains beside a layer's frozen matrices and tables of `table` parameters."""
        before = tuning or FineTuning(method="")
        added = self.rank * sum(map(sum, self._chosen(matrices)))
        return replace(
            before,
            layer_params=added,
            added_params=added,
            embedding_params=table if self.saves_embedding else before.embedding_params,
            head_params=table if self.saves_head else before.head_params,
            method=f"{before.method.partition('LoRA')[0].strip()} LoRA r {self.rank}".strip(),
        )

    def _chosen(self, matrices: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        """Return the matrices of a layer that have adapters; ModelError for unknown names."""
        if self.targets is None:
            return matrices
        names = _ATTENTION + _MLP[-(len(matrices) - len(_ATTENTION)) :]
        found = {_SAME_AS.get(name, name) for name in self.targets}
        if not found or not found <= set(names):
            raise ModelError(
                f"{_ADAPTER} has target_modules {sorted(self.targets)}; matrices of {self.base} "
                f"are {list(names)}. Plan it with --model {self.base} --lora-rank {self.rank}."
            )
        return tuple(size for name, size in zip(names, matrices, strict=True) if name in found)


def _is_adapter(folder: Path) -> bool:
    return (folder / _ADAPTER).is_file() and not (folder / "config.json").is_file()
