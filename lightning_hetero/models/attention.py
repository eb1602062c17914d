"""Decide which kernel computes attention over packed sequences of different lengths.

Every backend costs the sum of the squared lengths, never the square of their sum: samples in one
packed micro-batch don't see each other. Micro-batches of packed samples are Hydraulis's (§6), and
the cost model of the assignment rests on this property.

Shape suffixes: T packed tokens, H heads (keys and values may have fewer), D head dim, L tokens of
one sequence, B sequences of equal length.
"""

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from lightning_hetero.core.errors import BatchError, ConfigurationError, ModelError

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

__all__ = [
    "AttentionFunction",
    "SequenceMask",
    "attention_backends",
    "check_backend",
    "choose_attention",
    "register_attention",
    "varlen_attention",
]

# Older versions of torch lack grouped queries in varlen_attn: keys need as many heads as queries.
_VARLEN_ATTN_GROUPS_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
_FLASH_MAX_HEAD_DIM = 256


@dataclass(frozen=True, kw_only=True)
class SequenceMask:
    """Which tokens attend to each other: those of one sequence, within `causal` and `window`."""

    cu_seqlens: Tensor
    """Starts of the sequences, and the end of the last one, int32, (sequences + 1,)."""
    max_seqlen: int
    """Tokens of the longest sequence."""
    causal: bool = True
    """Whether a token attends only to itself and earlier tokens."""
    window: int | None = None
    """A token attends only to tokens fewer than this many positions away; None: to all."""

    @property
    def window_size(self) -> tuple[int, int]:
        """The kernels' argument: tokens before and after that a token attends to, -1 for all."""
        reach = -1 if self.window is None else self.window - 1
        return reach, 0 if self.causal else reach


class AttentionFunction(Protocol):
    """The type of an attention backend, as `register_attention` takes it."""

    def __call__(
        self,
        query_THD: Tensor,
        key_THD: Tensor,
        value_THD: Tensor,
        mask: SequenceMask,
        *,
        scale: float | None,
    ) -> Tensor:
        """Return (T, H, D) from (T, H, D) queries and (T, KV heads, D) keys and values."""


def varlen_attention(  # noqa: PLR0913 - the kernels' own arguments, and which of them runs
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    cu_seqlens: Tensor,
    *,
    max_seqlen: int,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attend inside each packed sequence; query head h reads key head h // (H / KV heads).

    Args:
        query_THD: Queries, (T, H, D).
        key_THD: Keys, (T, KV heads, D); H is a multiple of the KV heads.
        value_THD: Values, shaped like the keys.
        cu_seqlens: Starts of the sequences, and the end of the last one, int32, (sequences + 1,).
        max_seqlen: Tokens of the longest sequence.
        causal: Whether a token attends only to itself and earlier tokens of its sequence.
        window: A token attends only to tokens fewer than this many positions away; None: to all.
        scale: Factor on the scores; None for 1 / sqrt(D).
        backend: A name from `attention_backends`, or "auto" for `choose_attention`.

    Raises:
        ConfigurationError: No backend has that name.
        ModelError: H isn't a multiple of the KV heads.
        BatchError: `cu_seqlens` doesn't end at T; only the backend "sdpa" checks it.
    """
    if query_THD.shape[1] % key_THD.shape[1]:
        raise ModelError(
            f"{query_THD.shape[1]} query heads can't share {key_THD.shape[1]} key heads. Use a "
            "number of heads that is a multiple of num_kv_heads."
        )
    check_backend(backend)
    name = choose_attention(query_THD) if backend == "auto" else backend
    mask = SequenceMask(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, causal=causal, window=window)
    return _BACKENDS[name](query_THD, key_THD, value_THD, mask, scale=scale)


def check_backend(name: str) -> None:
    """Raise ConfigurationError unless a backend has this name, or it is "auto"."""
    if name != "auto" and name not in _BACKENDS:
        raise ConfigurationError(
            f"No attention backend is called {name!r}; known: {', '.join(attention_backends())}, "
            "auto. Use one of these or add yours with register_attention."
        )


def choose_attention(query_THD: Tensor) -> str:
    """Return the name of the fastest built-in backend for this device, dtype and head dim."""
    head_dim = query_THD.shape[-1]
    flash_takes_it = (
        query_THD.is_cuda
        and query_THD.dtype in (torch.float16, torch.bfloat16)
        and head_dim <= _FLASH_MAX_HEAD_DIM
        and head_dim % 8 == 0
    )
    if not flash_takes_it:
        return "sdpa"
    return "torch_varlen" if flash_attn_varlen_func is None else "flash_attn"


def register_attention(name: str, function: AttentionFunction) -> None:
    """Add a backend, or replace the one of that name.

    Raises:
        ConfigurationError: The name is empty or "auto".
    """
    if not name or name == "auto":
        raise ConfigurationError(
            f"{name!r} can't name an attention backend: it stands for the automatic choice. "
            "Choose another name."
        )
    _BACKENDS[name] = function


def attention_backends() -> tuple[str, ...]:
    """Return the names of the registered backends that can run here, sorted."""
    return tuple(sorted(_BACKENDS))


def _flash_attention(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    mask: SequenceMask,
    *,
    scale: float | None,
) -> Tensor:
    offsets = mask.cu_seqlens.to(query_THD.device, torch.int32)
    output: Tensor = flash_attn_varlen_func(
        query_THD,
        key_THD,
        value_THD,
        offsets,
        offsets,
        mask.max_seqlen,
        mask.max_seqlen,
        softmax_scale=scale,
        causal=mask.causal,
        window_size=mask.window_size,
    )
    return output


def _torch_varlen_attention(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    mask: SequenceMask,
    *,
    scale: float | None,
) -> Tensor:
    offsets = mask.cu_seqlens.to(query_THD.device, torch.int32)
    grouping: dict[str, Any] = {}
    if _VARLEN_ATTN_GROUPS_HEADS:
        grouping = {"enable_gqa": query_THD.shape[1] != key_THD.shape[1]}
    else:
        key_THD, value_THD = (_repeat_heads(t, query_THD.shape[1]) for t in (key_THD, value_THD))
    output = varlen_attn(
        query_THD,
        key_THD,
        value_THD,
        offsets,
        offsets,
        mask.max_seqlen,
        mask.max_seqlen,
        scale=scale,
        window_size=mask.window_size,
        **grouping,
    )
    assert isinstance(output, Tensor)
    return output


# Not compiled: the loop over lengths would be compiled again for every new list of lengths.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _sdpa_attention(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    mask: SequenceMask,
    *,
    scale: float | None,
) -> Tensor:
    """Run SDPA once per sequence, or once for all if they have the same length.

    Measured on one CPU core, forward and backward: one call takes half the time of 128 calls on 32
    tokens each, and no less than 4 calls on 1,024 tokens each. Lengths of real text rarely repeat,
    so only the case that needs no copying is batched.
    """
    num_tokens, num_heads, head_dim = query_THD.shape
    lengths = [length for length in mask.cu_seqlens.diff().tolist() if length]
    if sum(lengths) != num_tokens:
        raise BatchError(
            f"cu_seqlens covers {sum(lengths)} tokens but the batch has {num_tokens}. Let it start "
            "at 0 and end at the number of packed tokens."
        )
    if not lengths:
        return torch.zeros_like(query_THD)
    key_THD, value_THD = (_repeat_heads(tensor, num_heads) for tensor in (key_THD, value_THD))
    packed = (query_THD, key_THD, value_THD)
    if len(set(lengths)) == 1:
        shape = (len(lengths), lengths[0], num_heads, head_dim)
        query, key, value = (tensor.reshape(shape).transpose(1, 2) for tensor in packed)
        output_BHLD = _sdpa(query, key, value, mask, scale=scale)
        return output_BHLD.transpose(1, 2).reshape(num_tokens, num_heads, head_dim)
    pieces = (torch.split(tensor.transpose(0, 1)[None], lengths, dim=2) for tensor in packed)
    outputs_BHLD = [
        _sdpa(query, key, value, mask, scale=scale)
        for query, key, value in zip(*pieces, strict=True)
    ]
    return torch.cat(outputs_BHLD, dim=2)[0].transpose(0, 1)


def _sdpa(
    query_BHLD: Tensor,
    key_BHLD: Tensor,
    value_BHLD: Tensor,
    mask: SequenceMask,
    *,
    scale: float | None,
) -> Tensor:
    visible_LL, causal, length = None, mask.causal, query_BHLD.shape[2]
    if mask.window is not None and length > mask.window:
        ones_LL = torch.ones(length, length, dtype=torch.bool, device=query_BHLD.device)
        visible_LL = ones_LL.triu(1 - mask.window).tril(0 if causal else mask.window - 1)
        causal = False
    return F.scaled_dot_product_attention(
        query_BHLD, key_BHLD, value_BHLD, attn_mask=visible_LL, is_causal=causal, scale=scale
    )


def _repeat_heads(tensor_THD: Tensor, num_heads: int) -> Tensor:
    repeats = num_heads // tensor_THD.shape[1]
    return tensor_THD if repeats == 1 else tensor_THD.repeat_interleave(repeats, dim=1)


_BACKENDS: dict[str, AttentionFunction] = {
    "sdpa": _sdpa_attention,
    "torch_varlen": _torch_varlen_attention,
}
if flash_attn_varlen_func is not None:
    _BACKENDS["flash_attn"] = _flash_attention
