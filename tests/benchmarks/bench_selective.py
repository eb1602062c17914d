"""Weigh what it costs to compute a layer again but for its products.

Matrix products and attention are kept; norms, rotation and the MLP's activation run again in
backward. That is a level between none and whole layers because it saves 30 % of a
layer's bytes for at most 5 % of its time: by count 45 %, for the reference layer and Hugging Face's
llama. By FLOPs the rest is next to nothing; it reads and writes, so that its share of the time
falls with the width, as products grow with its square.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.runtime.setup.products import KeptProducts
from lightning_hetero.runtime.setup.profiling import ModelShard
from tests.benchmarks.harness import Row
from tests.capped_memory import MemoryCounter

WIDTH, NUM_TOKENS, REPEATS = 1024, 512, 9


def run() -> list[Row]:
    """Compare the bytes and the processor time of one layer, kept and computed again."""
    layer, hidden, rest = _layer(WIDTH, NUM_TOKENS)
    rows = _selectively("the reference layer", lambda: (layer, (hidden, *rest), {}))
    return [*rows, *_selectively("a llama layer of Hugging Face", _hugging_face_layer)]


def _layer(width: int, num_tokens: int) -> tuple[Callable[..., Any], Tensor, tuple[Any, ...]]:
    """Return a reference layer, its input, and what else it takes."""
    spec = ModelSpec(
        name="layer",
        num_layers=1,
        hidden_size=width,
        num_heads=width // 64 or 2,
        num_kv_heads=width // 64 or 2,
        intermediate_size=width * 43 // 16,
        vocab_size=64,
        gated_mlp=True,
        tied_embeddings=False,
    )
    shard = ModelShard(spec, 1, 1, torch.device("cpu"))
    _, rest = shard.batch((num_tokens,))
    return shard.model.layers[0], shard.hidden(num_tokens), rest


def _hugging_face_layer() -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=WIDTH * 43 // 16,
        num_attention_heads=WIDTH // 64,
        num_key_value_heads=WIDTH // 64,
        attn_implementation="sdpa",
    )
    hidden = torch.randn(1, NUM_TOKENS, WIDTH, requires_grad=True)
    positions = torch.arange(NUM_TOKENS)[None]
    rotary = LlamaRotaryEmbedding(config)(hidden, positions)
    layer = LlamaDecoderLayer(config, 0)
    return layer, (hidden,), {"position_embeddings": rotary}


def _selectively(
    name: str, make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]
) -> list[Row]:
    layer, args, kwargs = make()
    products = KeptProducts()

    def kept() -> Tensor:
        output: Tensor = layer(*args, **kwargs)
        return output

    def selective() -> Tensor:
        output: Tensor = products(layer, *args, **kwargs)
        return output

    selective().sum().backward()  # type: ignore[no-untyped-call]
    sizes = [_kept_bytes(step) for step in (kept, selective)]
    seconds = [(_cpu_s(kept), _cpu_s(selective)) for _ in range(REPEATS)]
    whole_s, again_s = (statistics.median(column) for column in zip(*seconds, strict=True))
    return [
        Row(
            name=f"selective recomputation of {name}: share of its bytes that it saves",
            ours=sizes[1] / NUM_TOKENS,
            peer=sizes[0] / NUM_TOKENS,
            unit="B/token",
            target=0.3,
            better="higher",
            value=1 - sizes[1] / sizes[0],
            note=f"fp32, width {WIDTH}, {NUM_TOKENS} tokens",
        ),
        Row(
            name=f"selective recomputation of {name}: share of its time that it adds",
            ours=again_s,
            peer=whole_s,
            target=0.05,
            value=again_s / whole_s - 1,
            note="forward and backward with it beside those without; processor time",
        ),
    ]


def _kept_bytes(step: Callable[[], Tensor]) -> int:
    with MemoryCounter(2**40) as counter:
        before = counter.live_bytes
        output = step()
        kept: int = counter.live_bytes - before
        del output
    return kept


def _cpu_s(step: Callable[[], Tensor]) -> float:
    start = time.thread_time()
    step().sum().backward()  # type: ignore[no-untyped-call]
    return time.thread_time() - start
