"""Decide what a layer keeps for its backward, and whether it runs compiled.

Activation checkpointing keeps a layer's inputs and computes the rest again in backward. It pays
where a stage's activations of all micro-batches in flight don't fit (MEM_V in AutoHet's Eq. 4).
Compilation is regional: each layer by itself, so that stages may begin and end at any layer and
like layers share their code.

Both act in training passes only. A pass without gradients keeps nothing, and is not worth a
compilation of its own. What tensor parallelism communicates inside a layer stays outside of the
compiled code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from lightning_hetero.core.errors import ConfigurationError

__all__ = ["ActivationCheckpointing", "LayerOptions", "is_cache"]

ActivationCheckpointing = Literal["none", "full"] | int
"""No layer, every layer, or every n-th layer, the first among them."""

_Forward = Callable[..., Any]

_COMPILED_FORMS = 4
"""Of one layer: for fixed and for varying numbers of tokens, first and later micro-batches."""


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """How layers run in training."""

    activation_checkpointing: ActivationCheckpointing = "none"
    """Layers whose activations are computed again in backward."""
    compile_layers: bool = False
    """Whether `torch.compile` compiles each layer."""

    def __post_init__(self) -> None:
        value = self.activation_checkpointing
        is_period = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if value not in ("none", "full") and not is_period:
            raise ConfigurationError(
                f"activation_checkpointing is {value!r}; it must be 'none', 'full', or n of 1 or "
                "more for every n-th layer."
            )

    @property
    def _change_layers(self) -> bool:
        return self.compile_layers or self.activation_checkpointing != "none"

    def refuse_without_layers(self) -> None:
        """Raise ConfigurationError if anything is asked of layers, as there are none."""
        if self._change_layers:
            raise ConfigurationError(
                "activation_checkpointing and compile_layers work layer by layer, but the module "
                "has no list of layers. Keep its repeated blocks in one nn.ModuleList, or name "
                'it: HeteroStrategy(layers="model.blocks").'
            )

    def checkpoints(self, index: int) -> bool:
        """Return whether layer `index` computes its activations again."""
        value = self.activation_checkpointing
        if isinstance(value, str):
            return value == "full"
        return index % value == 0

    def wrap_layer(self, index: int, forward: _Forward) -> _Forward:
        """Return what runs in place of a layer's forward."""
        return _WrappedForward(self, index, forward) if self._change_layers else forward


class _WrappedForward:
    """A layer's forward under `LayerOptions`; an object, so that the layer can be pickled."""

    def __init__(self, options: LayerOptions, index: int, forward: _Forward) -> None:
        self._plain = forward
        self._training = forward
        if options.compile_layers:
            self._training = torch.compile(forward)
            # Sharded layers don't share their code; beyond the limit they would run uncompiled.
            config = torch._dynamo.config
            config.recompile_limit = max(config.recompile_limit, _COMPILED_FORMS * (index + 1))
        self._checkpoints = options.checkpoints(index)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._plain(*args, **kwargs)
        # A cache of keys and values would hold on to activations, and a layer that is computed
        # again would write into it twice. Nothing reads it in training.
        args = tuple(None if is_cache(arg) else arg for arg in args)
        kwargs = {name: None if is_cache(arg) else arg for name, arg in kwargs.items()}
        if not self._checkpoints:
            return self._training(*args, **kwargs)
        return checkpoint(self._training, *args, use_reentrant=False, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Compiled code can't be pickled; a copy of the layer runs as its author wrote it.
        return _unwrapped, (self._plain,)


def _unwrapped(forward: _Forward) -> _Forward:
    return forward


def is_cache(value: object) -> bool:
    """Return whether a value is a Hugging Face cache, without importing transformers."""
    return any(
        kind.__name__ == "Cache" and kind.__module__ == "transformers.cache_utils"
        for kind in type(value).__mro__
    )
