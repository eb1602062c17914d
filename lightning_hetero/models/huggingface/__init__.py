"""Hugging Face models: packed batches, weights read slice by slice, folders written again.

Needs the extra `hf`: `pip install 'lightning-hetero[hf]'`. Nothing else in the package imports it,
and models that need none of this are trained without it.
"""

from lightning_hetero.models.huggingface.export import export_pretrained
from lightning_hetero.models.huggingface.packed import packed_inputs, use_packed_attention
from lightning_hetero.models.huggingface.pretrained import PretrainedWeights, load_pretrained

__all__ = [
    "PretrainedWeights",
    "export_pretrained",
    "load_pretrained",
    "packed_inputs",
    "use_packed_attention",
]
