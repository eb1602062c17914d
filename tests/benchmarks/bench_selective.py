"""Weigh what it costs to compute a layer again: all of it, and selectively.

**All of it**: our recomputation beside `torch.utils.checkpoint`, on a layer so short that what both
do beside computing shows.

**Selectively**: `torch.utils.checkpoint` with a policy keeps the outputs of matrix products and of
attention; norms, rotation and the MLP's activation run again in backward. It would be a level
between none and whole layers if it saved 30 % of a layer's bytes for at most 5 % of its time. By
count it saves 40 %. What it costs was measured on a busy CPU: 5.7 % once, 3.2 % another time, of
layers of 512; the shorter a layer, the more, as the policy is asked for each operation. So the
package hasn't got it. The last row reaches its target as long as it costs too much; that it fails
on a quiet machine is a reason to build it, and a GPU may say otherwise.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.runtime.setup.model_shard import ModelShard
from lightning_hetero.runtime.setup.recomputed_call import computed_again
from lightning_hetero.testing.capped_memory import MemoryCounter
from tests.benchmarks.harness import Row

WIDTH, NUM_TOKENS, REPEATS = 512, 1024, 9
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def run() -> list[Row]:
    """Compare the bytes and the processor time of one layer, kept and computed again."""
    return [_again(), *_selectively()]


def _again() -> Row:
    layer, hidden, rest = _layer(32, 64)
    ours, torchs, kept = _median_s(
        lambda: computed_again(layer, hidden, *rest),
        lambda: checkpoint(layer, hidden, *rest, use_reentrant=False),
        lambda: layer(hidden, *rest),
        repeats=200,
    )
    return Row(
        name="forward and backward of a short layer that is computed again",
        ours=1e3 * ours,
        peer=1e3 * torchs,
        unit="ms",
        target=1.0,
        better="lower",
        kind="measured",
        value=ours / torchs,
        note=f"peer: torch.utils.checkpoint; kept {1e3 * kept:.2f} ms; processor time",
    )


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


def _selectively() -> list[Row]:
    layer, hidden, rest = _layer(WIDTH, NUM_TOKENS)
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)

    def kept() -> Tensor:
        output: Tensor = layer(hidden, *rest)
        return output

    def selective() -> Tensor:
        output: Tensor = checkpoint(layer, hidden, *rest, use_reentrant=False, context_fn=contexts)
        return output

    sizes = [_kept_bytes(step) for step in (kept, selective)]
    before_s, after_s = _median_s(kept, selective, repeats=REPEATS)
    return [
        Row(
            name="selective recomputation: share of a layer's bytes that it saves",
            ours=sizes[1] / NUM_TOKENS,
            peer=sizes[0] / NUM_TOKENS,
            unit="B/token",
            target=0.3,
            better="higher",
            kind="measured",
            value=1 - sizes[1] / sizes[0],
            note="reference layer in fp32, nothing recomputed",
        ),
        Row(
            name="selective recomputation: time that it adds to a layer (not built while above)",
            ours=after_s,
            peer=before_s,
            unit="s",
            target=0.05,
            better="higher",
            kind="measured",
            value=after_s / before_s - 1,
            note="forward and backward on a CPU, the policy's own cost included",
        ),
    ]


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation in _KEPT:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _kept_bytes(step: Callable[[], Tensor]) -> int:
    with MemoryCounter(2**40) as counter:
        before = counter.live_bytes
        output = step()
        kept: int = counter.live_bytes - before
        del output
    return kept


def _median_s(*steps: Callable[[], Tensor], repeats: int) -> list[float]:
    """Return the processor time of each step with its backward, by turns."""
    rounds = [[_cpu_s(step) for step in steps] for _ in range(repeats)]
    return [statistics.median(found) for found in zip(*rounds, strict=True)]


def _cpu_s(step: Callable[[], Tensor]) -> float:
    start = time.thread_time()
    step().sum().backward()  # type: ignore[no-untyped-call]
    return time.thread_time() - start
