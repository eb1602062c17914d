"""Attention over packed sequences of different lengths.

Attention costs the sum of the squared lengths, never the square of their sum: samples in one packed
micro-batch don't see each other. Micro-batches of packed samples are Hydraulis's (§6), and the cost
model of the assignment depends on this property.

Shape suffixes: T packed tokens, H heads (keys and values may have fewer), D head dim, L tokens of
one sequence, B sequences of equal length.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from lightning_hetero.core.errors import BatchError, ModelError

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

_KERNEL_MAX_HEAD_DIM = 256


def varlen_attention(  # noqa: PLR0913 - the kernel's own arguments
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    cu_seqlens: Tensor,
    *,
    max_seqlen: int,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend inside each packed sequence; query head h reads key head h // (H / KV heads).

    16-bit tensors on CUDA use flash-attn's kernel if it is installed (extra `flash`), else torch's;
    all others use SDPA for each sequence.

    Args:
        query_THD: Queries, (T, H, D).
        key_THD: Keys, (T, KV heads, D); H is a multiple of the KV heads.
        value_THD: Values, shaped like the keys.
        cu_seqlens: Starts of the sequences, and the end of the last one, int32, (sequences + 1,).
        max_seqlen: Tokens of the longest sequence.
        causal: Whether a token attends only to itself and earlier tokens of its sequence.
        window: A token attends only to tokens fewer than this many positions away; None: to all.
        scale: Factor on the scores; None for 1 / sqrt(D).

    Raises:
        ModelError: H isn't a multiple of the KV heads.
        BatchError: `cu_seqlens` doesn't end at T; only SDPA checks it.
    """
    num_heads, num_kv_heads = query_THD.shape[1], key_THD.shape[1]
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{num_heads} query heads can't share {num_kv_heads} key heads. Use a number of heads "
            "that is a multiple of num_kv_heads."
        )
    reach = -1 if window is None else window - 1
    window_size = (reach, 0 if causal else reach)
    is_for_kernel = _kernel_takes(query_THD)
    offsets = cu_seqlens.to(query_THD.device, torch.int32) if is_for_kernel else cu_seqlens
    bounds: tuple[Any, ...] = (offsets, offsets, max_seqlen, max_seqlen)
    found: Tensor
    if is_for_kernel and flash_attn_varlen_func is not None:
        options = {"softmax_scale": scale, "causal": causal, "window_size": window_size}
        found = flash_attn_varlen_func(query_THD, key_THD, value_THD, *bounds, **options)
        return found
    repeats = num_heads // num_kv_heads
    if repeats > 1:
        key_THD, value_THD = (t.repeat_interleave(repeats, dim=1) for t in (key_THD, value_THD))
    packed = (query_THD, key_THD, value_THD)
    if not is_for_kernel:
        found = _sdpa_each(packed, cu_seqlens, causal=causal, window=window, scale=scale)
        return found
    attended = varlen_attn(*packed, *bounds, scale=scale, window_size=window_size)
    assert isinstance(attended, Tensor)
    return attended


def _kernel_takes(query_THD: Tensor) -> bool:
    head_dim = query_THD.shape[-1]
    is_half = query_THD.dtype in (torch.float16, torch.bfloat16)
    return query_THD.is_cuda and is_half and head_dim <= _KERNEL_MAX_HEAD_DIM and head_dim % 8 == 0


# Not compiled: the loop over lengths would be compiled again for every new list of lengths.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _sdpa_each(
    packed: tuple[Tensor, ...],
    cu_seqlens: Tensor,
    *,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """Run SDPA once per sequence, or once for all if they have the same length.

    Measured on one CPU core, forward and backward: one call takes half the time of 128 calls on 32
    tokens each, and no less than 4 calls on 1,024 tokens each. Lengths of real text rarely repeat,
    so only the case that needs no copying is batched.
    """

    def attend(query_BHLD: Tensor, key_BHLD: Tensor, value_BHLD: Tensor) -> Tensor:
        visible_LL, is_causal, length = None, causal, query_BHLD.shape[2]
        if window is not None and length > window:
            ones_LL = torch.ones(length, length, dtype=torch.bool, device=query_BHLD.device)
            visible_LL = ones_LL.triu(1 - window).tril(0 if causal else window - 1)
            is_causal = False
        return F.scaled_dot_product_attention(
            query_BHLD, key_BHLD, value_BHLD, attn_mask=visible_LL, is_causal=is_causal, scale=scale
        )

    num_tokens, num_heads, head_dim = packed[0].shape
    lengths = [length for length in cu_seqlens.diff().tolist() if length]
    if sum(lengths) != num_tokens:
        raise BatchError(
            f"cu_seqlens covers {sum(lengths)} tokens but the batch has {num_tokens}. Let it start "
            "at 0 and end at the number of packed tokens."
        )
    if not lengths:
        return torch.zeros_like(packed[0])
    if len(set(lengths)) == 1:
        shape = (len(lengths), lengths[0], num_heads, head_dim)
        output_BHLD = attend(*(tensor.reshape(shape).transpose(1, 2) for tensor in packed))
        return output_BHLD.transpose(1, 2).reshape(num_tokens, num_heads, head_dim)
    pieces = (torch.split(tensor.transpose(0, 1)[None], lengths, dim=2) for tensor in packed)
    outputs_BHLD = [attend(*parts) for parts in zip(*pieces, strict=True)]
    return torch.cat(outputs_BHLD, dim=2)[0].transpose(0, 1)
