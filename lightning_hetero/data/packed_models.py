"""Set up the Hugging Face models of a module so that they keep packed samples apart."""

import sys

from torch import nn

from lightning_hetero.core.errors import ModelError

__all__ = ["let_models_attend_packed"]


def let_models_attend_packed(module: nn.Module) -> None:
    """Call `use_packed_attention` on the Hugging Face models inside a module that need it.

    Transformers isn't imported here first.

    Raises:
        ModelError: A model can't be set up: samples packed together would see each other.
    """
    # Every Hugging Face model's own module imports transformers: without it there is none.
    if "transformers.modeling_utils" not in sys.modules:
        return
    from transformers import PreTrainedModel

    from lightning_hetero.models.huggingface import use_packed_attention
    from lightning_hetero.models.huggingface.packed import attends_packed

    for model in module.modules():
        if not isinstance(model, PreTrainedModel) or attends_packed(model):
            continue
        try:
            use_packed_attention(model)
        except ModelError as error:
            raise ModelError(
                f"HeteroDataModule packs samples end to end. {error} Give the data module a "
                "`collate` that pads them."
            ) from error
