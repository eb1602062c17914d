"""Decide how families without a tensor-parallel plan of their own are cut.

Transformers gives most decoders a plan; these are the families that have none. Names are matched
from any module on, so the head in front (`GPT2LMHeadModel`, `BertForMaskedLM`) doesn't matter.
"""

from collections.abc import Mapping

__all__ = ["KNOWN_TP_PLANS"]

_BERT = {
    "word_embeddings": "embedding_rowwise",
    "layer.*.attention.self.query": "colwise",
    "layer.*.attention.self.key": "colwise",
    "layer.*.attention.self.value": "colwise",
    "layer.*.attention.output.dense": "rowwise",
    "layer.*.intermediate.dense": "colwise",
    "layer.*.output.dense": "rowwise",
}

KNOWN_TP_PLANS: Mapping[str, Mapping[str, str]] = {
    "bert": _BERT,
    "roberta": _BERT,
    "gpt2": {
        "wte": "embedding_rowwise",
        # Query, key and value are three blocks of one weight, each sharded by heads.
        "h.*.attn.c_attn": "packed_colwise:3",
        "h.*.attn": "local_sizes:split_size",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
}
"""Plans by `config.model_type`."""
