"""Reference model, packed batches and attention over them, without Lightning or processes."""

from lightning_hetero.models.attention import varlen_attention
from lightning_hetero.models.llama import HeteroLM, LMConfig, LMLayer
from lightning_hetero.models.packing import (
    IGNORED_LABEL,
    PackedBatch,
    pack_samples,
    packed_cross_entropy,
)

__all__ = [
    "IGNORED_LABEL",
    "HeteroLM",
    "LMConfig",
    "LMLayer",
    "PackedBatch",
    "pack_samples",
    "packed_cross_entropy",
    "varlen_attention",
]
