"""Run a layer so that it keeps its activations for backward, or recomputes them there.

A recomputed layer keeps only its inputs; a selectively recomputed one keeps matrix products and
attention, too. That pays if a stage's activations of all micro-batches in flight don't fit (MEM_V
in AutoHet's Eq. 4). Passes without gradients keep nothing in any case. `LayerOptions` decide if the
plan doesn't; they also say whether layers are compiled.

Compilation is regional: each layer by itself, so that stages may begin and end at any layer and
like layers share their code. Compiled layers run in training passes only: a pass without gradients
isn't worth compiling for. Communication of tensor parallelism inside a layer stays outside the
compiled code.
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
from lightning_hetero.runtime.setup.products import KeptProducts
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
"""What is recomputed: nothing, the cheap part of every layer, every layer, or every n-th layer."""

_Forward = Callable[..., Any]

_COMPILED_FORMS = 4
"""Variants of one layer: for fixed and varying numbers of tokens, first and later micro-batches."""


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """How layers run in training."""

    activation_checkpointing: ActivationCheckpointing = "none"
    """Layers whose activations are recomputed in backward, in stages whose plan doesn't say."""
    activation_budget_bytes: int | None = None
    """Most bytes of layers' activations on each rank of such a stage; None sets no limit."""
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
        """Raise ConfigurationError if any option is set: the module has no layers."""
        if self != LayerOptions():
            raise ConfigurationError(
                "activation_checkpointing, activation_budget_bytes and compile_layers work layer "
                "by layer, but the module has no list of layers. Keep its repeated blocks in one "
                'nn.ModuleList, or name it: HeteroStrategy(layers="model.blocks").'
            )

    def recomputed(self, layers: range) -> frozenset[int]:
        """Return which of a stage's layers recompute all of their activations."""
        value = self.activation_checkpointing
        if isinstance(value, str):
            return frozenset(layers if value == "full" else ())
        return frozenset(index for index in layers if index % value == 0)

    def selective(self, layers: range) -> range:
        """Return which of a stage's layers recompute all but matrix products and attention."""
        return layers if self.activation_checkpointing == "selective" else range(0)

    def add_to(self, plan: ParallelPlan) -> ParallelPlan:
        """Return the plan with recomputation added where only these options ask for it.

        For predictions only: it counts layers, without saying which. A budget isn't added.
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
        """Return the function to run in place of a layer's forward."""
        return _CompiledForward(index, forward) if self.compile_layers else forward


def is_said(stage: StagePlan) -> bool:
    """Whether the plan itself says what a stage recomputes."""
    return any(value is not None for value in stage.recomputation.values())


def is_compiled(module: nn.Module, forward: _Forward | None = None) -> bool:
    """Whether a module is compiled: by the user, or by `wrap_layer`, which has made `forward`."""
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
        # A cache of keys and values would be a new argument in each pass; nothing reads it.
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
    """Tokens of the micro-batch."""
    report: Callable[[LayerBytes], None]
    """Called with the counted bytes per token."""


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """The activations that one micro-batch recomputes on a stage."""

    layers: Container[int] = ()
    """Indices of the layers that are recomputed as a whole."""
    selective: Container[int] = ()
    """Indices of the layers that keep matrix products and attention. In compiled layers these can't
    be told apart, so they are recomputed as a whole."""
    measured: MeasuredLayer | None = None
    """A layer that isn't recomputed, and whose saved bytes are counted; None if they are known."""

    def run(
        self, call: LayerCall, layer: nn.Module, hidden: int | str | None, products: KeptProducts
    ) -> Any:
        """Run a layer in the forward pass, and return its output.

        A layer that the model itself checkpoints isn't checkpointed once more.

        Args:
            call: The layer's call.
            layer: The layer.
            hidden: Which of its arguments is the hidden state; None if unknown.
            products: Recomputes the layer but for its products.
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
        if is_whole or is_compiled(layer, call.forward):
            return checkpoint(call.forward, *call.args, use_reentrant=False, **call.kwargs)
        return products(call.forward, *call.args, **call.kwargs)


def _measure(
    measured: MeasuredLayer, call: LayerCall, layer: nn.Module, hidden_key: int | str | None
) -> Any:
    """Run a layer and report the bytes it keeps, without weights and what all layers share."""
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
    """Return the present pack and unpack hooks of saved tensors; None if there are none."""
    hooks: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def _is_checkpointed() -> bool:
    """Whether this runs inside `torch.utils.checkpoint`, which keeps no activations."""
    hooks = _saving_hooks()
    return hooks is not None and hooks[0].__module__ == checkpoint.__module__
