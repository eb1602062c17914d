"""Let Hugging Face models attend to packed batches by varlen attention, without masks.

Transformers looks up attention and mask functions by name in two registries. The functions
registered here pass the sequences of a packed batch to `models.attention`. So a micro-batch costs
the sum of its squared lengths (Hydraulis §6), and no mask over all its tokens is made. Batches that
aren't packed (rows with padding, decoding with a cache) use transformers' own masks and SDPA.
"""

from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lightning_hetero.core.errors import BatchError, ModelError
from lightning_hetero.models.attention import varlen_attention
from lightning_hetero.models.packing import PackedBatch, num_samples_seen

_NAME = "lightning_hetero_packed"
"""Transformers treats names that contain "flash" or "sdpa" specially, so this contains neither."""
_ADDED_TO_SCORES = ("softcap", "s_aux", "position_bias")
"""Arguments with which some model families change the scores; varlen attention doesn't support
them."""
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_has_windows: ContextVar[bool | None] = ContextVar("has_windows", default=None)
"""Whether the model that is running a packed batch has sliding windows; None if none is running."""


def use_packed_attention(module: nn.Module) -> None:
    """Let the Hugging Face models inside a module attend through `varlen_attention`.

    Args:
        module: The model, or a module that contains one; it may be on the meta device.

    Raises:
        ModelError: There is no such model, or it has layers other than attention over whole
            sequences or sliding windows, in which packed samples would see each other. Sliding
            windows that the attention function isn't told about are refused in the first forward.
    """
    models = [item for item in module.modules() if isinstance(item, PreTrainedModel)]
    if not models:
        raise ModelError(
            f"{type(module).__name__} holds no Hugging Face model. Call use_packed_attention with "
            "one, or with a module that has built one."
        )
    for model in models:
        _check_layers(model)
    inner = {item for model in models for item in model.modules() if item is not model}
    for model in models:
        if model not in inner:
            model.set_attn_implementation(_NAME)
            enter = partial(
                _enter, first_position=_first_position(model), has_windows=_windows_of(model)
            )
            model.register_forward_pre_hook(enter, with_kwargs=True)
            model.register_forward_hook(_leave, always_call=True)


def attends_packed(model: PreTrainedModel) -> bool:
    """Whether `use_packed_attention` has set up a model."""
    return bool(model.config._attn_implementation == _NAME)


def packed_inputs(batch: PackedBatch, *, labels: bool = False) -> dict[str, Any]:
    """Return the arguments with which a Hugging Face model takes a packed batch as one row.

    `model(**packed_inputs(batch)).logits` has shape (1, T, vocabulary). With labels, the arguments
    are the same as those of `model(**batch)`.

    Args:
        batch: Labels must be at the place of their logits: the next token for a causal model, the
            masked token itself for a masked one. Positions count from 0, also for RoBERTa.
        labels: Whether to include labels, so that the model computes the loss.
    """
    inputs = dict(batch.items())
    if not labels:
        del inputs["labels"], inputs["shift_labels"]
    return inputs


def _enter(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    first_position: int,
    has_windows: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if kwargs.get("cu_seq_lens_q") is None:
        _refuse_lone_ids(model, args, kwargs)
        _has_windows.set(None)
        return args, kwargs
    if kwargs.get("attention_mask") is not None:
        raise BatchError(
            f"{type(model).__name__} got a packed batch and an attention_mask. A packed batch has "
            "no padding: leave the mask out."
        )
    _has_windows.set(has_windows)
    return args, {**kwargs, "position_ids": kwargs["position_ids"] + first_position}


def _leave(*_: Any) -> None:
    _has_windows.set(None)


def _make_mask(*, use_vmap: bool = False, **kwargs: Any) -> Tensor | None:
    if _has_windows.get() is None:
        mask: Tensor | None = sdpa_mask(use_vmap=use_vmap, **kwargs)
        return mask
    if use_vmap:
        raise ModelError(
            "The model masks attention by a function of its own, which varlen attention doesn't "
            "know. Don't pack its batches, or don't call use_packed_attention."
        )
    return None


def _attend(
    module: nn.Module,
    query_BHLD: Tensor,
    key_BHLD: Tensor,
    value_BHLD: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the output, (B, L, H, D), and no scores: the registry's signature."""
    has_windows, cu_seqlens = _has_windows.get(), kwargs.get("cu_seq_lens_q")
    if cu_seqlens is None:
        if has_windows is not None:
            raise ModelError(
                "The model doesn't hand cu_seq_lens_q on to its attention, so packed samples would "
                "see each other. Train it on padded batches."
            )
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query_BHLD, key_BHLD, value_BHLD, attention_mask, **kwargs
        )
        return output
    if has_windows and "sliding_window" not in kwargs:
        raise ModelError(
            "The model has sliding windows only in its masks, of which packed batches have none. "
            "Train it on padded batches, without use_packed_attention."
        )
    _check_packed(query_BHLD, key_BHLD, value_BHLD, kwargs)
    causal = kwargs.get("is_causal")
    output_THD = varlen_attention(
        query_BHLD[0].transpose(0, 1),
        key_BHLD[0].transpose(0, 1),
        value_BHLD[0].transpose(0, 1),
        cu_seqlens,
        max_seqlen=kwargs["max_length_q"],
        causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
        window=kwargs.get("sliding_window"),
        scale=kwargs.get("scaling"),
    )
    return output_THD[None], None


# At import, so that processes that unpickle a model have both.
AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, _make_mask)


def _refuse_lone_ids(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise BatchError if a model gets a packed batch's token ids without `cu_seqlens`.

    Nothing is refused if the user gives an attention mask.
    """
    says_ends = any(kwargs.get(name) is not None for name in ("cu_seq_lens_q", "attention_mask"))
    if says_ends or len(args) > 1:
        return
    count = num_samples_seen(kwargs.get("input_ids", args[0] if args else None))
    if count > 1:
        raise BatchError(
            f"{type(model).__name__} got the token ids of {count} packed samples without their "
            "borders, so they would see each other. Give it the whole batch: model(**batch), or "
            "model(**packed_inputs(batch)) for logits without a loss."
        )


def _first_position(model: nn.Module) -> int:
    """Return the index of a sample's first position: 0, or `padding_idx + 1` as in RoBERTa."""
    for name, item in model.named_modules():
        is_position = name.endswith("position_embeddings") and isinstance(item, nn.Embedding)
        if is_position and item.padding_idx is not None:
            return int(item.padding_idx) + 1
    return 0


def _check_packed(
    query_BHLD: Tensor, key_BHLD: Tensor, value_BHLD: Tensor, kwargs: dict[str, Any]
) -> None:
    if len(query_BHLD) != 1 or query_BHLD.shape[2] != key_BHLD.shape[2]:
        raise BatchError(
            f"A packed batch is one row without a cache, but queries have shape "
            f"{tuple(query_BHLD.shape)} and keys {tuple(key_BHLD.shape)}. Call the model with "
            "packed_inputs(batch)."
        )
    if kwargs.get("dropout"):
        raise ModelError(
            f"The model drops {kwargs['dropout']:.0%} of the attention, which varlen kernels don't "
            "do. Set the attention dropout of its config to 0."
        )
    added = [name for name in _ADDED_TO_SCORES if kwargs.get(name) is not None]
    if added or value_BHLD.shape[-1] != query_BHLD.shape[-1]:
        what = f"uses {', '.join(added)}" if added else "has values of another size than queries"
        raise ModelError(
            f"The model's attention {what}, which varlen attention doesn't support. Train it on "
            "padded batches, without use_packed_attention."
        )


def _windows_of(model: PreTrainedModel) -> bool:
    """Whether layers of a model have sliding windows."""
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return "sliding_attention" in layer_types
    return getattr(config, "sliding_window", None) is not None


def _check_layers(model: PreTrainedModel) -> None:
    """Raise ModelError for a model in which samples packed together would see each other."""
    config = model.config.get_text_config()
    other_types = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    why = None
    if not model._can_set_attn_implementation():
        why = "doesn't look its attention up in transformers' registry"
    elif config.is_encoder_decoder:
        why = "attends from one sequence to another"
    elif model._is_stateful or other_types:
        why = f"has layers with {', '.join(sorted(other_types) or ['state of their own'])}"
    if why is not None:
        raise ModelError(
            f"{type(model).__name__} {why}, so packed samples could see each other. Train it on "
            "padded batches, without use_packed_attention."
        )
