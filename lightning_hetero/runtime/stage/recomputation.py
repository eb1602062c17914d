"""Run a layer so that it keeps its activations for backward, or computes them again there.

A recomputed layer keeps its inputs only, a selectively recomputed one matrix products and attention
as well. That pays where a stage's activations of all micro-batches in flight don't fit (MEM_V in
AutoHet's Eq. 4). Passes without gradients keep nothing in any case.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_hetero.core.recomputation import LayerBytes
from lightning_hetero.runtime.setup.recomputed_call import (
    computed_again,
    computed_again_but_products,
)
from lightning_hetero.runtime.setup.saved_bytes import SavedBytes
from lightning_hetero.runtime.stage.layer_calls import LayerCall
from lightning_hetero.runtime.stage.layer_wrapping import is_compiled

__all__ = ["MeasuredLayer", "Recomputation"]


@dataclass(frozen=True, kw_only=True)
class MeasuredLayer:
    """A layer whose saved bytes are counted while it runs."""

    index: int
    num_tokens: int
    """Of the micro-batch."""
    report: Callable[[LayerBytes], None]
    """Gets what was counted."""


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """The activations that one micro-batch computes again on a stage."""

    layers: Container[int] = ()
    """Indices of the layers that are computed again."""
    selective: Container[int] = ()
    """Of those of which matrix products and attention are kept. Nobody sees those of compiled ones,
    which are computed again as a whole."""
    measured: MeasuredLayer | None = None
    """A kept one of which nobody knows yet what it keeps."""

    def run(self, call: LayerCall, layer: nn.Module, hidden: int | str | None) -> Any:
        """Compute a layer for the first time.

        A layer that the model itself checkpoints isn't checkpointed once more.

        Args:
            call: Its call.
            layer: The layer.
            hidden: Which of its arguments is the hidden state, if that is known.
        """
        measured = self.measured
        if not (self.layers or self.selective or measured) or not torch.is_grad_enabled():
            return call.run()
        if measured is not None and measured.index == call.index and _saving_hooks() is None:
            return _measure(measured, call, layer, hidden)
        is_whole = call.index in self.layers
        if not (is_whole or call.index in self.selective) or _is_checkpointed():
            return call.run()
        call = call.without_caches()
        is_whole |= is_compiled(layer, call.forward)
        again = computed_again if is_whole else computed_again_but_products
        return again(call.forward, *call.args, **call.kwargs)


def _measure(
    measured: MeasuredLayer, call: LayerCall, layer: nn.Module, hidden_key: int | str | None
) -> Any:
    """Run a layer and report what it keeps; its weights and what all layers share don't count."""
    call = call.without_caches()
    hidden = call.given[call.hidden_argument() if hidden_key is None else hidden_key]
    others = tree_leaves([value for value in call.given.values() if value is not hidden])
    shared = [leaf for leaf in others if isinstance(leaf, Tensor)]
    with SavedBytes(without=(*layer.parameters(), *layer.buffers(), *shared)) as saved:
        output = call.run()
    of_input = hidden.untyped_storage().nbytes()
    kept = max(saved.total, of_input)
    measured.report(
        LayerBytes(kept=kept / measured.num_tokens, recomputed=of_input / measured.num_tokens)
    )
    return output


def _saving_hooks() -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """Return what packs and unpacks saved tensors just now; None if autograd keeps them itself."""
    hooks: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def _is_checkpointed() -> bool:
    """Whether this runs inside of `torch.utils.checkpoint`, which keeps nothing as it is."""
    hooks = _saving_hooks()
    return hooks is not None and hooks[0].__module__ == checkpoint.__module__
