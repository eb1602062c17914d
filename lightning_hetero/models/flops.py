"""Decide what counts as useful work: model FLOPs of a step, for MFU and for cost models.

The count is PaLM's (Chowdhery et al. 2022, appendix B: 6 N + 12 L H Q T per token, no
recomputation), with two changes: attention is counted per sequence and halved, because a causal
kernel skips the scores above the diagonal, and N leaves out the input embedding, a look-up.
"""

from collections.abc import Iterable

from lightning_hetero.models.llama import LMConfig

__all__ = ["matmul_parameters", "step_flops"]


def matmul_parameters(config: LMConfig) -> int:
    """Return the number of parameters that multiply each token: all but norms and embedding."""
    head_width = config.head_dim * config.num_kv_heads
    attention = 2 * config.hidden_size * (config.hidden_size + head_width)
    mlp = 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * (attention + mlp) + config.hidden_size * config.vocab_size


def step_flops(config: LMConfig, lengths: Iterable[int]) -> int:
    """Return FLOPs of forward and backward over samples of these lengths.

    6 · matmul_parameters · sum(l) + 12 · num_layers · hidden_size · sum(l²) / 2: two FLOPs per
    multiply-add, backward twice the forward; scores and weighted values are two products of
    l² · hidden_size multiply-adds each per layer, half of them above the causal diagonal.
    """
    tokens = squares = 0
    for length in lengths:
        tokens += length
        squares += length * length
    attention = 6 * config.num_layers * config.hidden_size * squares
    return 6 * matmul_parameters(config) * tokens + attention
