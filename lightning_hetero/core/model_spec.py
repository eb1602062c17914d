"""Sizes of a transformer: parameters, FLOPs and activation bytes, without building it.

A model is one decoder or encoder stack of equal layers between an embedding and a head. A multiply
and an add count as two FLOPs. Attention costs the sum of squared sequence lengths, never the square
of their sum; causal attention costs half of that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, Self

from lightning_hetero.core.errors import ModelError
from lightning_hetero.core.model_config import (
    DEFAULT_RANK,
    QUANTIZATIONS,
    Adapter,
    FineTuning,
    cached_config,
    sizes_of_config,
)
from lightning_hetero.core.reading import build, plain, readable
from lightning_hetero.core.texts import load_file, nearest, parse_json, parse_yaml, show

__all__ = ["KNOWN_MODELS", "ModelSpec"]


@readable
class ModelSpec:
    """Sizes of one transformer.

    ::

        print(ModelSpec.load("gpt3-6.7b").num_params)  # a known model, or a file that describes one

    Raises:
        ModelError: A size is not positive, or the numbers of heads don't divide.
    """

    name: str
    """Name by which profiles and reports refer to it."""
    num_layers: int
    """Number of repeated blocks."""
    hidden_size: int
    """Width of an activation."""
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key and value heads; divides `num_heads`."""
    intermediate_size: int
    """Width inside the MLP."""
    vocab_size: int
    """Number of token ids, the rows of embedding and head."""
    gated_mlp: bool
    """Whether the MLP has a gate beside its up projection (SwiGLU and similar)."""
    tied_embeddings: bool
    """Whether the head shares the embedding's weight."""
    biases: bool = False
    """Whether linear and normalisation layers have biases."""
    max_positions: int = 0
    """Rows of a learned position table; 0 if positions are computed."""
    causal: bool = True
    """Whether a token attends only to earlier ones, which halves attention's cost."""
    head_dim: int | None = None
    """Width of one head; None means `hidden_size / num_heads`."""
    tuning: FineTuning | None = None
    """What trains, and how the rest is stored; None if all parameters train."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type not in (int, int | None) or value is None:
                continue
            lowest = 0 if item.name == "max_positions" else 1
            most = _MOST_LAYERS if item.name == "num_layers" else _LARGEST_SIZE
            if type(value) is not int or not lowest <= value <= most:
                raise ModelError(
                    f"Model {self.name!r} has {item.name} {show(value)}; it must be a whole "
                    f"number, {lowest} or more and at most {most:,}."
                )
        is_cut = self.head_dim is not None or self.hidden_size % self.num_heads == 0
        if self.num_heads % self.num_kv_heads or not is_cut:
            raise ModelError(
                f"Model {self.name!r} has hidden_size {self.hidden_size}, {self.num_heads} heads "
                f"and {self.num_kv_heads} key-value heads; each must be a multiple of the next. "
                "Give head_dim if heads have another width."
            )

    @cached_property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * (self.head_dim or self.hidden_size // self.num_heads)

    @cached_property
    def key_size(self) -> int:
        """Width of all key heads together, and also of all value heads."""
        return self.query_size // self.num_heads * self.num_kv_heads

    def key_size_in_group(self, tp_degree: int) -> int:
        """Return the width of the key heads on all ranks of a tensor-parallel group together.

        All ranks count as if they had as many as the rank with the most. This is more than
        `key_size` if the degree doesn't divide the key heads, so that ranks share some.
        """
        if self.num_kv_heads % tp_degree == 0 or self.num_heads % tp_degree:
            return self.key_size
        share, readers = self.num_heads // tp_degree, self.num_heads // self.num_kv_heads
        starts = range(0, self.num_heads, share)
        most = max(-(-(start + share) // readers) - start // readers for start in starts)
        return self.key_size // self.num_kv_heads * most * tp_degree

    def copied_params_per_layer(self, tp_degree: int) -> int:
        """Return the parameters of a layer that a group holds in addition to one copy of each."""
        return 2 * self.hidden_size * (self.key_size_in_group(tp_degree) - self.key_size)

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of each of a layer's matrices, without adapters."""
        hidden, query, key = self.hidden_size, self.query_size, self.key_size
        ups = (2 if self.gated_mlp else 1) * ((hidden, self.intermediate_size),)
        attention = (hidden, query), (hidden, key), (hidden, key), (query, hidden)
        return *attention, *ups, (self.intermediate_size, hidden)

    @cached_property
    def matrix_params_per_layer(self) -> int:
        """Parameters of a layer's matrices, without adapters: they cost FLOPs for every token."""
        return sum(prod(sizes) for sizes in self.matrices)

    @cached_property
    def own_params_per_layer(self) -> int:
        """Parameters of one layer, frozen or not, without adapters."""
        vectors = 2 * self.hidden_size
        if self.biases:
            vectors += self.query_size + 2 * self.key_size + 4 * self.hidden_size
            vectors += (2 if self.gated_mlp else 1) * self.intermediate_size
        return self.matrix_params_per_layer + vectors

    @property
    def params_per_layer(self) -> int:
        """Parameters of one layer that train: all of them without `tuning`."""
        return self.own_params_per_layer if self.tuning is None else self.tuning.layer_params

    @property
    def added_params_per_layer(self) -> int:
        """Parameters of a layer's adapters."""
        return 0 if self.tuning is None else self.tuning.added_params

    @property
    def frozen_matrix_params_per_layer(self) -> int:
        """Parameters of a layer's matrices that have no gradients."""
        frozen = self.own_params_per_layer + self.added_params_per_layer - self.params_per_layer
        return max(0, min(frozen, self.matrix_params_per_layer))

    @property
    def norm_params(self) -> int:
        """Parameters of one normalisation layer that train."""
        return (2 if self.biases else 1) * self.hidden_size if self.tuning is None else 0

    @property
    def whole_params_per_layer(self) -> int:
        """Parameters of one layer that each rank of a tensor-parallel group holds whole.

        These are both norms and the biases of the two matrices whose products are summed; and of
        each pair of LoRA matrices the one whose side of the base isn't cut: half of them.
        """
        if self.tuning is not None:
            return self.added_params_per_layer // 2
        return 2 * self.norm_params + (2 * self.hidden_size if self.biases else 0)

    @property
    def embedding_params(self) -> int:
        """Parameters before the first layer that train."""
        return self._own_embedding if self.tuning is None else self.tuning.embedding_params

    @property
    def head_params(self) -> int:
        """Parameters after the last layer that train.

        A head tied to the embedding counts here, too, since first and last stage each hold the
        weight.
        """
        return self._own_head if self.tuning is None else self.tuning.head_params

    @property
    def tied_params(self) -> int:
        """Parameters that embedding and head share, and that train."""
        return min(self._tied, self.embedding_params, self.head_params)

    @property
    def num_params(self) -> int:
        """Parameters of the whole model that train, a tied weight once; see `num_frozen_params`."""
        layers = self.num_layers * self.params_per_layer
        return layers + self.embedding_params + self.head_params - self.tied_params

    @property
    def num_frozen_params(self) -> int:
        """Parameters of the whole model that never train, a tied weight once."""
        if self.tuning is None:
            return 0
        layers = self.num_layers * (self.own_params_per_layer + self.added_params_per_layer)
        return layers + self._own_embedding + self._own_head - self._tied - self.num_params

    @property
    def _tied(self) -> int:
        return self.vocab_size * self.hidden_size if self.tied_embeddings else 0

    @property
    def _own_embedding(self) -> int:
        return (self.vocab_size + self.max_positions) * self.hidden_size

    @property
    def _own_head(self) -> int:
        return (self.vocab_size + (2 if self.biases else 1)) * self.hidden_size

    def frozen_bytes(self, width: int) -> tuple[float, float, float]:
        """Return the bytes of frozen weights in a layer, before the first and after the last.

        `width` is the number of bytes of a value in computations, which all but matrices have.
        """
        if self.tuning is None:
            return 0.0, 0.0, 0.0
        bits = self.tuning.stored_bits
        matrices = self.frozen_matrix_params_per_layer
        rest = self.own_params_per_layer + self.added_params_per_layer - self.params_per_layer
        layer = matrices * (width if bits is None else bits / 8) + (rest - matrices) * width
        outside = (self._own_embedding, self.embedding_params), (self._own_head, self.head_params)
        before, after = (float(width * max(0, own - trains)) for own, trains in outside)
        return layer, before, after

    def dequantized_params(self) -> tuple[int, int]:
        """Return how many values a layer's forward unpacks: of all matrices, of the largest."""
        if self.tuning is None or self.tuning.stored_bits is None:
            return 0, 0
        return self.frozen_matrix_params_per_layer, max(map(prod, self.matrices))

    def linear_flops_per_layer(self, num_tokens: int) -> float:
        """Return the FLOPs of one layer's matrices and adapters in one forward."""
        return 2.0 * (self.matrix_params_per_layer + self.added_params_per_layer) * num_tokens

    @cached_property
    def weight_gradient_shares(self) -> tuple[float, float]:
        """Shares of a forward's FLOPs that gradients of weights take, of a layer and the head."""
        # A backward is I + W; gradients of inputs cost as much as the forward.
        if self.tuning is None:
            return 1.0, 1.0
        all_params = self.matrix_params_per_layer + self.added_params_per_layer
        head = min(1.0, self.head_params / (self.vocab_size * self.hidden_size))
        return 1 - self.frozen_matrix_params_per_layer / all_params, head

    def attention_flops_per_layer(self, lengths: Sequence[int]) -> float:
        """Return the FLOPs of one layer's attention scores and mixing in one forward."""
        full = 4.0 * self.query_size * sum(length * length for length in lengths)
        return full / 2 if self.causal else full

    def head_flops(self, num_tokens: int) -> float:
        """Return the FLOPs of the head in one forward."""
        return 2.0 * self.hidden_size * self.vocab_size * num_tokens

    def step_flops(self, lengths: Sequence[int]) -> float:
        """Return the FLOPs of forward and backward over samples of these lengths, for MFU.

        PaLM's count (Chowdhery et al. 2022, appendix B) without recomputation, with attention per
        sequence, halved if causal, and without the embedding. Frozen weights have no gradients.
        """
        in_layers, in_head = self.weight_gradient_shares
        layer = (2 + in_layers) * self.linear_flops_per_layer(sum(lengths))
        layer += 3 * self.attention_flops_per_layer(lengths)
        return self.num_layers * layer + (2 + in_head) * self.head_flops(sum(lengths))

    def hidden_bytes(self, num_tokens: int, bytes_per_value: int = 2) -> int:
        """Return the bytes of the activation that one stage sends to the next."""
        return num_tokens * self.hidden_size * bytes_per_value

    def tuned(self, *, quantize: str | None = None, lora_rank: int | None = None) -> Self:
        """Return the model with frozen weights and what trains instead.

        Args:
            quantize: The format, a key of `QUANTIZATIONS`, of the layers' matrices; None: as the
                model says.
            lora_rank: Rank of LoRA adapters on all matrices; None: 16 for quantized weights, else
                none.

        Raises:
            ModelError: The rank is below 1.
        """
        tuning = self.tuning
        if quantize is not None:
            kept = tuning if tuning and tuning.added_params else FineTuning(method="")
            method = f"{quantize.upper()} {''.join(kept.method.partition('LoRA')[1:])}".strip()
            tuning = replace(kept, stored_bits=QUANTIZATIONS[quantize], method=method)
        if lora_rank is None and tuning is not None and not tuning.layer_params:
            lora_rank = DEFAULT_RANK
        tuned = replace(self, tuning=tuning)
        return tuned if lora_rank is None else tuned._with(Adapter(rank=lora_rank))

    def _with(self, adapter: Adapter) -> Self:
        table = self.vocab_size * self.hidden_size
        return replace(self, tuning=adapter.added_to(self.tuning, self.matrices, table))

    def to_dict(self) -> dict[str, Any]:
        """Return the sizes that differ from their defaults."""
        found: dict[str, Any] = plain(self)
        return found

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Build a model from data like that of `to_dict`; ModelError on wrong keys or sizes."""
        return build(cls, data, "model", ModelError)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, name: str) -> Self:
        """Build a model from the contents of a Hugging Face `config.json`.

        Raises:
            ModelError: A size is missing or can't be right.
        """
        return cls(name=name, **sizes_of_config(config, name))

    @classmethod
    def load(cls, name_or_path: str | Path) -> Self:
        """Return a known model, or read a YAML of sizes or a Hugging Face config.

        Args:
            name_or_path: A known name; a YAML file of sizes; a Hugging Face folder or its
                `config.json`; the folder of a PEFT LoRA adapter, which names its base; the name of
                a Hugging Face model in the local cache, such as `Qwen/Qwen3-8B`. Nothing is
                downloaded.

        Raises:
            ModelError: It is none of these.
        """
        known = KNOWN_MODELS.get(str(name_or_path).lower().replace(" ", "-"))
        if known is not None:
            return cls(**asdict(known))
        path = Path(name_or_path)
        adapter = Adapter.read(path)
        if adapter is not None:
            return cls.load(adapter.base)._with(adapter)
        name = path.resolve().name if path.is_dir() else path.resolve().parent.name
        config = path / "config.json" if path.is_dir() else path
        if not config.is_file():
            cached = cached_config(str(name_or_path))
            if cached is None:
                raise ModelError(_unknown(str(name_or_path)))
            config, name = cached, str(name_or_path)
        parse = partial(cls._parse, is_json=config.suffix == ".json", name=name)
        return load_file(config, "model", ModelError, parse)

    @classmethod
    def _parse(cls, text: str, *, is_json: bool, name: str) -> Self:
        if not is_json:
            return cls.from_dict(parse_yaml(text, "model", ModelError))
        data = parse_json(text, "model", ModelError)
        if not isinstance(data, Mapping):
            raise ModelError(f"The config is {show(data)}; it must be a mapping.")
        return cls.from_config(data, name=name)


def _unknown(name: str) -> str:
    """Return the error message for an unknown model."""
    text = (
        f"Unknown model {name[:200]!r}: neither a known name ({', '.join(sorted(KNOWN_MODELS))}) "
        "nor a YAML file of sizes, a folder with a config.json or a model in the Hugging Face cache"
    )
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return f"{text}. Get its sizes with `hf download {name} config.json`."
    return f"{text}.{nearest(name, KNOWN_MODELS)}"


_MOST_LAYERS, _LARGEST_SIZE = 100_000, 10**12


def _known(name: str, family: str, *sizes: int) -> ModelSpec:
    names = ("n_layer", "n_embd", "n_head", "num_key_value_heads", "n_inner", "vocab_size")
    config = dict(zip((*names, "n_positions"), sizes, strict=True))
    activation = "silu" if family == "llama" else "gelu"
    settings = {"model_type": family, "hidden_act": activation, **config}
    return ModelSpec.from_config(settings, name=name)


KNOWN_MODELS: dict[str, ModelSpec] = {
    model.name: model
    for model in (
        _known("bert-large", "bert", 24, 1024, 16, 16, 4096, 30522, 512),
        _known("gpt3-6.7b", "gpt2", 32, 4096, 32, 32, 16384, 50257, 2048),
        _known("opt-350m", "opt", 24, 1024, 16, 16, 4096, 50272, 2048),
        _known("gpt-neo-2.7b", "gpt_neo", 32, 2560, 20, 20, 10240, 50257, 2048),
        _known("llama-7b", "llama", 32, 4096, 32, 32, 11008, 32000, 2048),
        _known("llama-13b", "llama", 40, 5120, 40, 40, 13824, 32000, 2048),
        _known("llama-32b", "llama", 60, 6656, 52, 52, 17920, 32000, 2048),
        _known("llama-70b", "llama", 80, 8192, 64, 8, 28672, 32000, 4096),
    )
}
"""Models that `--model` knows by name."""
