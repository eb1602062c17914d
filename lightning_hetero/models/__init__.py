"""Reference model, packed batches and attention over them, without Lightning or processes."""

from lightning_hetero.models.attention import varlen_attention
from lightning_hetero.models.llama import HeteroLM, LMConfig, LMLayer
from lightning_hetero.models.loss import IGNORED_LABEL, packed_cross_entropy
from lightning_hetero.models.packing import PackedBatch, PackedCollate, pack_samples

__all__ = [
    "IGNORED_LABEL",
    "HeteroLM",
    "LMConfig",
    "LMLayer",
    "PackedBatch",
    "PackedCollate",
    "pack_samples",
    "packed_cross_entropy",
    "varlen_attention",
]
