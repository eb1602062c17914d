"""Run a layer so that it keeps its activations for backward, or computes them again there.

A recomputed layer keeps its inputs only, a selectively recomputed one matrix products and attention
as well. That pays where a stage's activations of all micro-batches in flight don't fit (MEM_V in
AutoHet's Eq. 4). Passes without gradients keep nothing in any case. Where the plan doesn't say what
layers keep, `LayerOptions` do, and whether they are compiled.

Compilation is regional: each layer by itself, so that stages may begin and end at any layer and
like layers share their code. Compiled layers run in training passes only: a pass without gradients
is not worth a compilation of its own. What tensor parallelism communicates inside a layer stays
outside of the compiled code.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan, StagePlan
from lightning_hetero.core.recomputation import LayerBytes
from lightning_hetero.runtime.setup.recomputed_call import (
    computed_again,
    computed_again_but_products,
)
from lightning_hetero.runtime.setup.saved_bytes import SavedBytes
from lightning_hetero.runtime.stage.layer_calls import LayerCall, is_cache

__all__ = [
    "ActivationCheckpointing",
    "LayerOptions",
    "MeasuredLayer",
    "Recomputation",
    "is_compiled",
    "is_said",
]

ActivationCheckpointing = Literal["none", "selective", "full"] | int
"""No layer, all that is cheap of every layer, every layer, or every n-th, the first among them."""

_Forward = Callable[..., Any]

_COMPILED_FORMS = 4
"""Of one layer: for fixed and for varying numbers of tokens, first and later micro-batches."""


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """How layers run in training."""

    activation_checkpointing: ActivationCheckpointing = "none"
    """Layers whose activations are computed again in backward, in stages whose plan doesn't say."""
    activation_budget_bytes: int | None = None
    """Most bytes of its layers' activations on each rank of such a stage; None sets no limit."""
    compile_layers: bool = False
    """Whether `torch.compile` compiles each layer."""

    def __post_init__(self) -> None:
        value: object = self.activation_checkpointing
        budget = self.activation_budget_bytes
        is_period = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if value not in ("none", "selective", "full") and not is_period:
            raise ConfigurationError(
                f"activation_checkpointing is {value!r}; it must be 'none', 'selective', 'full', "
                "or n of 1 or more for every n-th layer."
            )
        if budget is not None and budget < 1:
            raise ConfigurationError(
                f"activation_budget_bytes is {budget}; it must be 1 or more, or left out."
            )
        if value == "selective" and self.compile_layers:
            raise ConfigurationError(
                "activation_checkpointing is 'selective' and compile_layers is True, but a "
                "compiler chooses itself what it keeps. Leave compile_layers out, or take 'none' "
                "or 'full'."
            )
        if budget is not None and value != "none":
            raise ConfigurationError(
                f"activation_checkpointing is {value!r} and activation_budget_bytes is {budget}. "
                "Give one of them: the budget decides how many layers are computed again."
            )

    def refuse_without_layers(self) -> None:
        """Raise ConfigurationError if anything is asked of layers, as there are none."""
        if self != LayerOptions():
            raise ConfigurationError(
                "activation_checkpointing, activation_budget_bytes and compile_layers work layer "
                "by layer, but the module has no list of layers. Keep its repeated blocks in one "
                'nn.ModuleList, or name it: HeteroStrategy(layers="model.blocks").'
            )

    def recomputed(self, layers: range) -> frozenset[int]:
        """Return which of a stage's layers compute their activations again."""
        value = self.activation_checkpointing
        if isinstance(value, str):
            return frozenset(layers if value == "full" else ())
        return frozenset(index for index in layers if index % value == 0)

    def selective(self, layers: range) -> range:
        """Return which of a stage's layers compute all again but matrix products and attention."""
        return layers if self.activation_checkpointing == "selective" else range(0)

    def add_to(self, plan: ParallelPlan) -> ParallelPlan:
        """Return the plan with the layers of which only these options say that they recompute.

        For predictions: they stand for any others of their stage. A budget isn't added.
        """

        def told(stage: StagePlan) -> StagePlan:
            whole, selective = self.recomputed(stage.layers), self.selective(stage.layers)
            if is_said(stage) or not (whole or selective):
                return stage
            return replace(stage, recomputed_layers=len(whole), selective_layers=len(selective))

        pipelines = [
            replace(pipeline, stages=tuple(map(told, pipeline.stages)))
            for pipeline in plan.pipelines
        ]
        return replace(plan, pipelines=tuple(pipelines))

    def wrap_layer(self, index: int, forward: _Forward) -> _Forward:
        """Return what runs in place of a layer's forward."""
        return _CompiledForward(index, forward) if self.compile_layers else forward


def is_said(stage: StagePlan) -> bool:
    """Whether the plan says what a stage recomputes."""
    return any(value is not None for value in stage.recomputation.values())


def is_compiled(module: nn.Module, forward: _Forward | None = None) -> bool:
    """Whether a module is compiled: by its user, or in the forward that `wrap_layer` has made."""
    by_user = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
    return by_user or isinstance(forward, _CompiledForward)


class _CompiledForward:
    """A layer's compiled forward; an object, so that the layer can be pickled."""

    def __init__(self, index: int, forward: _Forward) -> None:
        self._plain = forward
        self._training = torch.compile(forward)
        # Sharded layers don't share their code; beyond the limit they would run uncompiled.
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, _COMPILED_FORMS * (index + 1))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._plain(*args, **kwargs)
        # A cache of keys and values would be another argument in each pass; nothing reads it.
        args = tuple(None if is_cache(arg) else arg for arg in args)
        kwargs = {name: None if is_cache(arg) else arg for name, arg in kwargs.items()}
        return self._training(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Compiled code can't be pickled; a copy of the layer runs as its author wrote it.
        return _unwrapped, (self._plain,)


def _unwrapped(forward: _Forward) -> _Forward:
    return forward


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
            return call.forward(*call.args, **call.kwargs)
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
