"""What trains of a model whose own weights are frozen, and the bits that those are stored in.

LoRA (Hu et al. 2021) adds adapters to frozen matrices; QLoRA (Dettmers et al. 2023) stores these in
4 bits, with scales for blocks of 64 values. Embedding, head and norms aren't quantized.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_hetero.core.errors import ModelError
from lightning_hetero.core.reading import readable, show

__all__ = ["QUANTIZATIONS", "FineTuning", "Matrix", "matrices_of", "read_quantization"]

QUANTIZATIONS: Mapping[str, float] = {
    "nf4": 4 + 32 / 64,
    "nf4-double": 4 + 8 / 64 + 32 / (64 * 256),
    "fp4": 4 + 32 / 64,
    "fp4-double": 4 + 8 / 64 + 32 / (64 * 256),
    "int4": 4 + 32 / 128,
    "int8": 8.0,
}
"""Bits per weight with the scales of its block: bitsandbytes' 4-bit formats with fp32 scales, or
with scales that are quantized themselves; torchao's int4 in groups of 128; int8 with a scale for
each row, which is nothing beside it."""


@readable
class FineTuning:
    """Which parameters train, and how the others are stored.

    Raises:
        ModelError: A number is below 0, or more adapters are added than train.
    """

    layer_params: int = 0
    """Parameters of one layer that train."""
    added_params: int = 0
    """How many of these are adapters': beside the layer's own, and computed in addition."""
    embedding_params: int = 0
    """Parameters before the first layer that train."""
    head_params: int = 0
    """Parameters after the last layer that train."""
    stored_bits: float | None = None
    """Bits per frozen weight of a layer's matrices; None if they are as wide as computations."""
    spared_values: int = 0
    """Values per token and layer that needn't be kept for a backward: inputs of matrices that have
    neither gradients nor adapters."""
    method: str = "frozen weights"
    """What it is called in summaries."""

    def __post_init__(self) -> None:
        sizes = self.added_params, self.embedding_params, self.head_params, self.spared_values
        bits = 1.0 if self.stored_bits is None else self.stored_bits
        if min(sizes) < 0 or self.layer_params < self.added_params or not 0 < bits <= 64:
            raise ModelError(
                f"Fine-tuning has {self.layer_params} parameters a layer, {sizes} added, in the "
                f"embedding, in the head and spared, in {bits} bits: numbers must be 0 or more, "
                "the first the largest of a layer's, bits above 0."
            )


def read_quantization(config: Mapping[str, Any], name: str) -> FineTuning | None:
    """Return how a Hugging Face config says that weights are stored; None if it says nothing.

    Raises:
        ModelError: The method isn't known.
    """
    found = config.get("quantization_config")
    if not isinstance(found, Mapping):
        return None
    kind = _kind_of(found)
    if kind in QUANTIZATIONS:
        return FineTuning(stored_bits=QUANTIZATIONS[kind], method=kind.upper())
    bits, group = found.get("bits"), found.get("group_size")
    if isinstance(bits, int) and isinstance(group, int) and bits > 0:
        # GPTQ and AWQ: a 16-bit scale and a zero point for each group, or for each row.
        stored = bits + ((16 + bits) / group if group > 0 else 0.0)
        return FineTuning(stored_bits=stored, method=f"{kind.upper()} {bits}-bit")
    raise ModelError(
        f"{name} is quantized by {show(dict(found))}, whose bytes aren't known. Known are "
        "bitsandbytes in 4 and 8 bits, torchao's int4 and int8, GPTQ and AWQ."
    )


def _kind_of(config: Mapping[str, Any]) -> str:
    """Return the key of `QUANTIZATIONS`, else the method's name."""
    method = config.get("quant_method", "bitsandbytes")
    method = str(getattr(method, "value", method))
    if method == "bitsandbytes":
        double = "-double" if config.get("bnb_4bit_use_double_quant") else ""
        four = str(config.get("bnb_4bit_quant_type", "fp4")) + double
        return four if config.get("load_in_4bit") else "int8"
    if method == "torchao":
        bits = re.search(r"int([48])", str(config.get("quant_type")), re.IGNORECASE)
        return f"int{bits[1]}" if bits else method
    return method


_FUSED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack")
_OUTPUT = ("o_proj", "out_proj", "out_lin", "c_proj", "dense")
_UP = ("up_proj", "gate_up_proj", "fc1", "c_fc", "lin1", "dense_h_to_4h", "dense")
_DOWN = ("down_proj", "c_proj", "fc2", "lin2", "dense_4h_to_h", "dense")


class Matrix(NamedTuple):
    """One matrix of a layer."""

    names: tuple[str, ...]
    """What families call it, alone or as a part of a wider one."""
    num_inputs: int
    num_outputs: int
    reads: str
    """What it multiplies; matrices that read the same keep it once for their backward."""

    def is_named_by(self, targets: str | Sequence[str]) -> bool:
        """Return whether names or a regular expression, as PEFT's `target_modules`, mean it."""
        texts = [targets] if isinstance(targets, str) else targets
        return any(re.search(rf"\b{n}\b", text) for n in self.names for text in texts)


def matrices_of(
    hidden: int, query: int, key: int, inner: int, *, gated: bool
) -> tuple[Matrix, ...]:
    """Return the matrices of attention and MLP; sizes are the widths of `ModelSpec`."""
    found = [
        Matrix(("q_proj", "query", "q_lin", *_FUSED), hidden, query, "layer"),
        Matrix(("k_proj", "key", "k_lin", *_FUSED), hidden, key, "layer"),
        Matrix(("v_proj", "value", "v_lin", *_FUSED), hidden, key, "layer"),
        Matrix(_OUTPUT, query, hidden, "attention"),
        Matrix(_UP, hidden, inner, "mlp"),
        Matrix(_DOWN, inner, hidden, "activation"),
    ]
    if gated:
        found.append(Matrix(("gate_proj", "gate_up_proj"), hidden, inner, "mlp"))
    return tuple(found)
