"""Hugging Face models: train on packed batches, read weights slice by slice, export folders.

Needs the extra `hf`: `pip install 'lightning-hetero[hf]'`. The rest of the package imports it only
if transformers has been imported already, so other models don't need it.
"""

try:
    from lightning_hetero.models.huggingface.adapters import add_adapters
    from lightning_hetero.models.huggingface.packed import packed_inputs, use_packed_attention
    from lightning_hetero.models.huggingface.pretrained import (
        PretrainedWeights,
        export_pretrained,
        load_pretrained,
    )
except ModuleNotFoundError as error:
    if error.name not in ("huggingface_hub", "transformers"):
        raise
    raise ModuleNotFoundError(
        f"Hugging Face models need {error.name}, which isn't installed. Run: "
        "pip install 'lightning-hetero[hf]'.",
        name=error.name,
    ) from error

__all__ = [
    "PretrainedWeights",
    "add_adapters",
    "export_pretrained",
    "load_pretrained",
    "packed_inputs",
    "use_packed_attention",
]
