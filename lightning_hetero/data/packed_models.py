"""See to it that the Hugging Face models of a module know where packed samples end."""

import sys

from torch import nn

from lightning_hetero.core.errors import ModelError

__all__ = ["let_models_attend_packed"]


def let_models_attend_packed(module: nn.Module) -> None:
    """Call `use_packed_attention` on the Hugging Face models inside a module that need it.

    Those that know the borders already are left as they are: by an earlier call, or because they
    attend by flash attention. Transformers isn't imported where nobody else has.

    Raises:
        ModelError: A model can't be told: samples packed together would see each other.
    """
    # A model's own module has imported it, so where it isn't there is no such model.
    if "transformers.modeling_utils" not in sys.modules:
        return
    from transformers import PreTrainedModel

    from lightning_hetero.models.huggingface import use_packed_attention
    from lightning_hetero.models.huggingface.packed import attends_packed, watch_lone_ids

    for model in module.modules():
        if not isinstance(model, PreTrainedModel):
            continue
        if attends_packed(model):
            watch_lone_ids(model)
            continue
        try:
            use_packed_attention(model)
        except ModelError as error:
            raise ModelError(
                f"HeteroDataModule packs samples end to end. {error} Give the data module a "
                "`collate` that pads them."
            ) from error
