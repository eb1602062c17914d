"""Weigh selective recomputation: keep what matrix products and attention make, compute the rest.

`torch.utils.checkpoint` with a selective policy keeps the outputs of matrix products and of
attention; norms, rotation and the MLP's activation run again in backward. It would be a level
between none and whole layers if it saved 30 % of a layer's bytes for at most 5 % of its time. By
count it saves 40 %. What it costs is measured on a CPU: 5.7 % when this was written, on a busy
machine, so the package hasn't got it. The rows reach their targets as long as that is so; one that
fails is a reason to build it, and a GPU may say otherwise.
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
from lightning_hetero.testing.capped_memory import MemoryCounter
from tests.benchmarks.harness import Row

WIDTH, NUM_TOKENS, REPEATS = 512, 1024, 9
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def run() -> list[Row]:
    """Compare the bytes and the CPU time of one layer, kept and recomputed by the policy."""
    spec = ModelSpec(
        name="selective",
        num_layers=1,
        hidden_size=WIDTH,
        num_heads=8,
        num_kv_heads=8,
        intermediate_size=WIDTH * 43 // 16,
        vocab_size=64,
        gated_mlp=True,
        tied_embeddings=False,
    )
    shard = ModelShard(spec, 1, 1, torch.device("cpu"))
    _, extra = shard.batch((NUM_TOKENS,))
    hidden = shard.hidden(NUM_TOKENS)
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)

    def kept() -> Tensor:
        return shard.run_block(hidden, 1, extra)

    def selective() -> Tensor:
        output: Tensor = checkpoint(
            shard.run_block, hidden, 1, extra, use_reentrant=False, context_fn=contexts
        )
        return output

    sizes = [_kept_bytes(step) for step in (kept, selective)]
    seconds: list[list[float]] = [[], []]
    for _ in range(REPEATS):
        for step, found in zip((kept, selective), seconds, strict=True):
            found.append(_cpu_s(step))
    before_s, after_s = (statistics.median(found) for found in seconds)
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


def _cpu_s(step: Callable[[], Tensor]) -> float:
    start = time.thread_time()
    step().sum().backward()  # type: ignore[no-untyped-call]
    return time.thread_time() - start
