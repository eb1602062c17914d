"""Reference model, packed batches and attention backends, without Lightning or processes."""

from lightning_hetero.models.attention import (
    AttentionFunction,
    SequenceMask,
    attention_backends,
    choose_attention,
    register_attention,
    varlen_attention,
)
from lightning_hetero.models.llama import HeteroLM, LMConfig, LMLayer
from lightning_hetero.models.loss import IGNORED_LABEL, packed_cross_entropy
from lightning_hetero.models.packing import PackedBatch, PackedCollate, pack_samples

__all__ = [
    "IGNORED_LABEL",
    "AttentionFunction",
    "HeteroLM",
    "LMConfig",
    "LMLayer",
    "PackedBatch",
    "PackedCollate",
    "SequenceMask",
    "attention_backends",
    "choose_attention",
    "pack_samples",
    "packed_cross_entropy",
    "register_attention",
    "varlen_attention",
]
