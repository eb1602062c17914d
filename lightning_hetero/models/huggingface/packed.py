"""Let Hugging Face models attend to packed batches by varlen attention, without masks.

Transformers looks up attention and mask functions by name in two registries. Those registered here
pass the sequences of a packed batch to `models.attention`. So a micro-batch costs the sum of its
squared lengths (Hydraulis §6), and no mask over all its tokens is ever made. Batches that aren't
packed (rows with padding, decoding with a cache) get transformers' own masks and SDPA.
"""

import inspect
import sys
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lightning_hetero.core.errors import BatchError, ModelError
from lightning_hetero.models.attention import check_backend, varlen_attention
from lightning_hetero.models.packing import PackedBatch, num_samples_seen

__all__ = ["attends_packed", "packed_inputs", "use_packed_attention", "watch_lone_ids"]

_NAME = "lightning_hetero_"

_ADDED_TO_SCORES = ("softcap", "s_aux", "position_bias")
"""Arguments by which some families change the scores; no varlen backend takes them."""
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def use_packed_attention(module: nn.Module, *, backend: str = "auto") -> None:
    """Let the Hugging Face models inside a module attend through the varlen backends.

    Args:
        module: The model, or a module that contains one; it may be on the meta device.
        backend: A name from `attention_backends`, or "auto".

    Raises:
        ModelError: There is no such model, or it has other layers than attention over whole
            sequences or sliding windows, in which samples packed together would see each other.
        ConfigurationError: No backend has that name.
    """
    check_backend(backend)
    models = [item for item in module.modules() if isinstance(item, PreTrainedModel)]
    if not models:
        raise ModelError(
            f"{type(module).__name__} holds no Hugging Face model. Call use_packed_attention with "
            "one, or with a module that has built one."
        )
    for model in models:
        _check_layers(model)
    attention = _PackedAttention(backend)
    attention.register()
    inner = {item for model in models for item in model.modules() if item is not model}
    for model in models:
        if model not in inner:
            model.set_attn_implementation(attention.name)
            enter = partial(attention.enter, first_position=_first_position(model))
            model.register_forward_pre_hook(enter, with_kwargs=True)
            model.register_forward_hook(attention.leave)


def attends_packed(model: PreTrainedModel) -> bool:
    """Whether a model's attention keeps the samples of a packed batch apart."""
    name = str(model.config._attn_implementation)
    # Transformers' own flash attention takes `cu_seq_lens_q` as ours does.
    return name.startswith(_NAME) or "flash_attention" in name


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


def watch_lone_ids(model: PreTrainedModel) -> None:
    """Let a model with transformers' own flash attention refuse only the ids of a packed batch.

    Models set up by `use_packed_attention` do so already. A second call changes nothing.
    """
    is_watched = _refuse_lone_ids in model._forward_pre_hooks.values()
    if not is_watched and not model.config._attn_implementation.startswith(_NAME):
        model.register_forward_pre_hook(_refuse_lone_ids, with_kwargs=True)


class _PackedAttention:
    """An attention function and a mask function, registered under one name.

    It registers itself again before every forward, so that copies of a model find it, also in
    processes that have unpickled one.
    """

    def __init__(self, backend: str) -> None:
        # Transformers treats names that contain "flash" or "sdpa" in a special way.
        self.name = f"{_NAME}{backend.encode().hex()}"
        self._backend = backend
        self._is_packed = False

    def register(self) -> None:
        AttentionInterface.register(self.name, self.attend)
        AttentionMaskInterface.register(self.name, self.make_mask)

    def enter(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        first_position: int,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.register()
        self._is_packed = kwargs.get("cu_seq_lens_q") is not None
        if not self._is_packed:
            _refuse_lone_ids(model, args, kwargs)
            return args, kwargs
        if kwargs.get("attention_mask") is not None:
            raise BatchError(
                f"{type(model).__name__} got a packed batch and an attention_mask. A packed batch "
                "has no padding: leave the mask out."
            )
        return args, {**kwargs, "position_ids": kwargs["position_ids"] + first_position}

    def leave(self, *_: Any) -> None:
        self._is_packed = False

    def make_mask(self, *, use_vmap: bool = False, **kwargs: Any) -> Tensor | None:
        if not self._is_packed:
            mask: Tensor | None = sdpa_mask(use_vmap=use_vmap, **kwargs)
            return mask
        if use_vmap:
            raise ModelError(
                "The model masks attention by a function of its own, which the varlen backends "
                "don't know. Don't pack its batches, or don't call use_packed_attention."
            )
        return None

    def attend(
        self,
        module: nn.Module,
        query_BHLD: Tensor,
        key_BHLD: Tensor,
        value_BHLD: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Return the output, (B, L, H, D), and no scores: the registry's signature."""
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        if cu_seqlens is None:
            if self._is_packed:
                raise ModelError(
                    "The model doesn't hand cu_seq_lens_q on to its attention, so packed samples "
                    "would see each other. Train it on padded batches."
                )
            output: tuple[Tensor, None] = sdpa_attention_forward(
                module, query_BHLD, key_BHLD, value_BHLD, attention_mask, **kwargs
            )
            return output
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
            backend=self._backend,
        )
        return output_THD[None], None


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
            f"The model's attention {what}, which the varlen backends don't support. Train it on "
            "padded batches, without use_packed_attention."
        )


def _check_layers(model: PreTrainedModel) -> None:
    """Raise ModelError for a model in which samples packed together would see each other."""
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ())
    window = "sliding_attention" in layer_types
    if not layer_types:
        window = getattr(config, "sliding_window", None) is not None
    why = None
    if not model._can_set_attn_implementation():
        why = "doesn't look its attention up in transformers' registry"
    elif config.is_encoder_decoder:
        why = "attends from one sequence to another"
    elif model._is_stateful or layer_types - _LAYER_TYPES:
        kinds = sorted(layer_types - _LAYER_TYPES) or ["state of their own"]
        why = f"has layers with {', '.join(kinds)}"
    elif window and "sliding_window=" not in inspect.getsource(sys.modules[type(model).__module__]):
        why = "has sliding windows only in its masks"
    if why is not None:
        raise ModelError(
            f"{type(model).__name__} {why}, so packed samples could see each other. Train it on "
            "padded batches, without use_packed_attention."
        )
