"""The loss of packed samples: mean cross entropy over target tokens, summed in fp32.

The runtime weights micro-batches by their target tokens. With a mean over these tokens, every plan
therefore gives the gradient that a single device would compute.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["IGNORED_LABEL", "packed_cross_entropy"]

IGNORED_LABEL = -100
"""Label of positions without a target, which don't count in the loss."""
_CHUNK_TOKENS = 1024


def packed_cross_entropy(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Return the mean cross entropy over labels that aren't ignored, in fp32; 0 if there are none.

    16-bit logits are converted to fp32 a chunk of tokens at a time, and again in backward, so there
    is never an fp32 copy of all logits.

    Args:
        logits_TV: Scores, (T, vocabulary).
        labels_T: Targets, shifted already, (T,); `IGNORED_LABEL` for tokens without one.
    """
    if logits_TV.dtype in (torch.float16, torch.bfloat16):
        pieces = (torch.split(tensor, _CHUNK_TOKENS) for tensor in (logits_TV, labels_T))
        parts = [
            checkpoint(_sum_fp32, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in zip(*pieces, strict=True)
        ]
        total = torch.stack(parts).sum()
    else:
        total = _sum_fp32(logits_TV, labels_T)
    return total / (labels_T != IGNORED_LABEL).sum().clamp(min=1)


def _sum_fp32(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    logits_TV = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    return F.cross_entropy(logits_TV, labels_T, reduction="sum", ignore_index=IGNORED_LABEL)
