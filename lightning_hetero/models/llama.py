"""The reference model: a LLaMA-like decoder over packed samples.

RMSNorm, rotary positions that restart with each sample, grouped-query attention and SwiGLU. It has
no parallel code: a stage is this model with fewer layers, made by the runtime. So a layer takes the
hidden state first and returns only that; its other inputs come from the batch, not from parameters
that may be on another rank.

Shape suffixes: T packed tokens, E hidden size, H heads, D head dim, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.models.attention import varlen_attention


@dataclass(frozen=True, kw_only=True)
class LMConfig:
    """Sizes of the reference model.

    ::

        model = HeteroLM(LMConfig(vocab_size=256, hidden_size=64, num_layers=4, num_heads=4))

    Raises:
        ConfigurationError: A size is below 1, or the numbers of heads don't divide.
    """

    vocab_size: int
    """Number of token ids."""
    hidden_size: int
    """Width of the hidden state; a multiple of `num_heads`."""
    num_layers: int
    """Number of decoder layers."""
    num_heads: int
    """Number of query heads; `hidden_size / num_heads` must be even for rotary positions."""
    num_kv_heads: int = 0
    """Number of key and value heads, a divisor of `num_heads`; 0 for as many as query heads."""
    intermediate_size: int = 0
    """Width inside the SwiGLU block; 0 for 8/3 of `hidden_size`, rounded up to 32."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of initial weights; output projections get it over sqrt(2 num_layers)."""
    tie_embeddings: bool = False
    """Whether head and embedding are one parameter."""

    def __post_init__(self) -> None:
        if self.num_kv_heads == 0:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.intermediate_size == 0:
            object.__setattr__(self, "intermediate_size", 32 * math.ceil(self.hidden_size / 12))
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.hidden_size % (2 * self.num_heads):
            raise ConfigurationError(
                f"hidden_size {self.hidden_size} doesn't give {self.num_heads} heads of even size. "
                f"Use a multiple of {2 * self.num_heads}."
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigurationError(
                f"{self.num_heads} query heads can't share {self.num_kv_heads} key heads. Use a "
                "num_kv_heads that divides num_heads."
            )

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def spec(self) -> ModelSpec:
        """The sizes in the form that planner and cost models take."""
        return ModelSpec(
            name=HeteroLM.__name__,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            gated_mlp=True,
            tied_embeddings=self.tie_embeddings,
        )


class _Normal(nn.Module):
    """A module with a weight that `reset_parameters` draws from normal(0, init_std)."""

    init_std: float
    weight: Tensor

    def reset_parameters(self) -> None:
        """Draw the weight anew."""
        nn.init.normal_(self.weight, std=self.init_std)


class _Linear(_Normal, nn.Linear):
    def __init__(self, in_features: int, out_features: int, *, init_std: float) -> None:
        self.init_std = init_std
        super().__init__(in_features, out_features, bias=False)


class _Embedding(_Normal, nn.Embedding):
    def __init__(self, num_embeddings: int, embedding_dim: int, *, init_std: float) -> None:
        self.init_std = init_std
        super().__init__(num_embeddings, embedding_dim)


class _Attention(nn.Module):
    """Grouped-query attention with rotary positions; works with any part of the heads."""

    takes_any_heads = True
    """Tells tensor parallelism that ranks may share key heads."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, std = config.hidden_size, config.init_std
        key_width = config.num_kv_heads * config.head_dim
        self.q_proj = _Linear(width, width, init_std=std)
        self.k_proj = _Linear(width, key_width, init_std=std)
        self.v_proj = _Linear(width, key_width, init_std=std)
        self.o_proj = _Linear(width, width, init_std=_output_std(config))

    @override
    def forward(
        self,
        hidden_TE: Tensor,
        cos_TD: Tensor,
        sin_TD: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
    ) -> Tensor:
        # -1, not num_heads: a tensor-parallel rank holds only some of the heads.
        query_THD = self.q_proj(hidden_TE).unflatten(-1, (-1, self.head_dim))
        key_THD = self.k_proj(hidden_TE).unflatten(-1, (-1, self.head_dim))
        value_THD = self.v_proj(hidden_TE).unflatten(-1, (-1, self.head_dim))
        output_THD = varlen_attention(
            _rotate(query_THD, cos_TD, sin_TD),
            _rotate(key_THD, cos_TD, sin_TD),
            value_THD,
            cu_seqlens,
            max_seqlen=max_seqlen,
        )
        output: Tensor = self.o_proj(output_THD.flatten(-2))
        return output


class _SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = _Linear(width, inner, init_std=config.init_std)
        self.up_proj = _Linear(width, inner, init_std=config.init_std)
        self.down_proj = _Linear(inner, width, init_std=_output_std(config))

    @override
    def forward(self, hidden_TE: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(hidden_TE)) * self.up_proj(hidden_TE))
        return output


class LMLayer(nn.Module):
    """One decoder layer; takes the hidden state first and returns only the next one."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = _SwiGLU(config)

    @override
    def forward(
        self,
        hidden_TE: Tensor,
        cos_TD: Tensor,
        sin_TD: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
    ) -> Tensor:
        """Return the next hidden state, (T, E)."""
        attended_TE = self.self_attn(
            self.input_layernorm(hidden_TE), cos_TD, sin_TD, cu_seqlens, max_seqlen
        )
        hidden_TE = hidden_TE + attended_TE
        output: Tensor = hidden_TE + self.mlp(self.post_attention_layernorm(hidden_TE))
        return output


class HeteroLM(nn.Module):
    """LLaMA-shaped language model over packed samples.

    Built under `torch.device("meta")` it takes no memory; after `to_empty`, call `tie_weights` and
    each submodule's `reset_parameters`.
    """

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = _Embedding(
            config.vocab_size, config.hidden_size, init_std=config.init_std
        )
        self.layers = nn.ModuleList(LMLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = _Linear(config.hidden_size, config.vocab_size, init_std=config.init_std)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make head and embedding one parameter, if the config says so."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    @property
    def tp_plan(self) -> dict[str, str]:
        """How tensor parallelism cuts parameters, by name pattern; all others are replicated.

        "colwise" cuts the output features (dim 0), "rowwise" the input features (dim 1), "vocab"
        the token ids (dim 0).
        """
        layer = "layers.*."
        attention_in = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        colwise = (*attention_in, "mlp.gate_proj", "mlp.up_proj")
        rowwise = ("self_attn.o_proj", "mlp.down_proj")
        return (
            {"embed_tokens.weight": "vocab"}
            | {f"{layer}{name}.weight": "colwise" for name in colwise}
            | {f"{layer}{name}.weight": "rowwise" for name in rowwise}
            | {"lm_head.weight": "vocab"}
        )

    @override
    def forward(
        self, input_ids: Tensor, cu_seqlens: Tensor, position_ids: Tensor, max_seqlen: int
    ) -> Tensor:
        """Return logits, (T, V).

        Args:
            input_ids: Token ids of all samples end to end, (T,).
            cu_seqlens: Starts of the samples, and the end of the last one, int32, (samples + 1,).
            position_ids: Each token's place in its own sample, (T,).
            max_seqlen: Tokens of the longest sample.
        """
        hidden_TE = self.embed_tokens(input_ids)
        cos_TD, sin_TD = _rotary_angles(position_ids, self.config)
        for layer in self.layers:
            hidden_TE = layer(hidden_TE, cos_TD, sin_TD, cu_seqlens, max_seqlen)
        logits_TV: Tensor = self.lm_head(self.norm(hidden_TE))
        return logits_TV


def _output_std(config: LMConfig) -> float:
    # Each layer adds twice to the residual stream; this keeps its variance independent of depth.
    return config.init_std / math.sqrt(2 * config.num_layers)


def _rotary_angles(position_ids: Tensor, config: LMConfig) -> tuple[Tensor, Tensor]:
    """Return cosine and sine in fp32, (T, D / 2): angle of pair i is position / theta^(2i / D)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=position_ids.device)
    frequencies = config.rope_theta ** (-exponents / config.head_dim)
    angles = position_ids.to(torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def _rotate(tensor_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Turn dims (i, i + D / 2) of each head by the token's angles, in fp32."""
    first, second = tensor_THD.float().chunk(2, dim=-1)
    cos, sin = cos_TD[:, None], sin_TD[:, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(tensor_THD.dtype)
