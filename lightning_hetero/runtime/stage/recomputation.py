"""Run a layer so that it keeps its activations for backward, or recomputes them there.

A recomputed layer keeps only its inputs for its backward; a selectively recomputed one also keeps
the results of matrix products and attention. A plan asks for it where the activations of all
micro-batches in flight don't fit (MEM_V in AutoHet's Eq. 4); where the plan says nothing,
`LayerOptions` decide.

Each layer is compiled separately, so that stages may begin and end at any layer and layers of one
kind share their compiled code. Compiled code runs in training only. Communication of tensor
parallelism inside a layer isn't compiled.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_hetero.core.errors import ConfigurationError, ModelError
from lightning_hetero.core.plan import ParallelPlan, StagePlan
from lightning_hetero.core.recomputation import LayerBytes
from lightning_hetero.runtime.setup.products import KeptProducts, SavedBytes

_ONE_STAGE = "or use a plan whose pipelines have one stage."


@dataclass
class LayerCall:
    """One call of a layer, made by the user's model."""

    index: int
    """Index of the layer."""
    forward: Callable[..., Any]
    """The layer's own forward."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @cached_property
    def given(self) -> dict[int | str, Any]:
        """The call's arguments, by position or name."""
        given: dict[int | str, Any] = dict(enumerate(self.args))
        return given | self.kwargs

    def run(self) -> Any:
        """Compute the layer."""
        return self.forward(*self.args, **self.kwargs)

    def without_caches(self) -> "LayerCall":
        """Return the call with None for any cache of keys and values: training doesn't read it.

        A cache would keep activations alive, and a recomputed layer would write into it twice.
        """
        args = tuple(None if is_cache(value) else value for value in self.args)
        kwargs = {name: None if is_cache(value) else value for name, value in self.kwargs.items()}
        return LayerCall(self.index, self.forward, args, kwargs)

    def with_argument(self, key: int | str, value: Any) -> "LayerCall":
        """Return the same call with one argument replaced."""
        if isinstance(key, int):
            args = (*self.args[:key], value, *self.args[key + 1 :])
            return LayerCall(self.index, self.forward, args, self.kwargs)
        return LayerCall(self.index, self.forward, self.args, {**self.kwargs, key: value})

    def hidden_argument(self, previous: Tensor | None = None) -> int | str:
        """Return the position or name of the argument that is the hidden state.

        Args:
            previous: What the previous layer returned, which must be the hidden state. If None, it
                is the first tensor among the arguments, floating-point ones before others.
        """
        if previous is not None:
            if self.args and self.args[0] is previous:
                return 0
            for key, value in self.given.items():
                if value is previous:
                    return key
            raise ModelError(
                f"The model computes something between layer {self.index - 1} and layer "
                f"{self.index}, which would be lost where a stage ends there: a layer's input must "
                "be the very tensor that the layer before returned. Hooks of layers that change "
                "it are computed there, too. Move the computation into the layers, " + _ONE_STAGE
            )
        first = self.args[0] if self.args else None
        if isinstance(first, Tensor) and first.is_floating_point():
            _check_plain(first)
            return 0
        tensors = {key: value for key, value in self.given.items() if isinstance(value, Tensor)}
        likely = [p for p, v in tensors.items() if v.is_floating_point() or v.is_complex()]
        for key in (*likely, *tensors):
            _check_plain(tensors[key])
            return key
        kinds = {key: type(value).__name__ for key, value in self.given.items()}
        raise ModelError(
            f"Layer {self.index} is called with {kinds}; one argument must be the hidden state, a "
            "tensor."
        )


def hidden_output(output: Any, index: int) -> Tensor:
    """Return the hidden state in the output of layer `index`: a tensor, or the first of a tuple."""
    if type(output) is Tensor and not output.is_nested:
        return output
    first = output[0] if isinstance(output, tuple | list) and output else output
    if isinstance(first, Tensor):
        _check_plain(first)
        return first
    raise ModelError(
        f"Layer {index} returns {type(output).__name__}; it must return the hidden state, a "
        "tensor, or a tuple that begins with it."
    )


def is_cache(value: object) -> bool:
    """Return whether a value is a Hugging Face cache, without importing transformers."""
    return any(
        kind.__name__ == "Cache" and kind.__module__ == "transformers.cache_utils"
        for kind in type(value).__mro__
    )


def _check_plain(hidden: Tensor) -> None:
    """Refuse a nested tensor."""
    if hidden.is_nested:
        raise ModelError(
            "The layers get a nested tensor, which can't travel between stages. Build "
            "nn.TransformerEncoder with enable_nested_tensor=False."
        )


ActivationCheckpointing = Literal["none", "selective", "full"] | int
"""Recompute nothing ("none"), all but matrix products and attention of every layer ("selective"),
every layer ("full"), or every n-th layer (a number n)."""

_Forward = Callable[..., Any]

_COMPILED_FORMS = 4
"""Number of compiled variants of a layer: for fixed and varying numbers of tokens, each for the
first and for later micro-batches."""


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """How layers run in training."""

    activation_checkpointing: ActivationCheckpointing = "none"
    """What is recomputed in backward on stages for which the plan says nothing."""
    activation_budget_bytes: int | None = None
    """Upper limit on the bytes of activations on each rank, on stages for which the plan says
    nothing; None sets no limit."""
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
        """Return the plan with recomputation where only these options ask for it.

        Only for predictions: the plan gets the number of layers, not which ones. Budgets aren't
        added.
        """

        def told(stage: StagePlan) -> StagePlan:
            whole, selective = self.recomputed(stage.layers), self.selective(stage.layers)
            if names_recomputation(stage) or not (whole or selective):
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


def names_recomputation(stage: StagePlan) -> bool:
    """Whether the plan itself names what a stage recomputes, so that options don't count."""
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
        # Each sharded layer gets compiled code of its own: beyond torch's limit some would run
        # uncompiled.
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, _COMPILED_FORMS * (index + 1))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._plain(*args, **kwargs)
        # A cache of keys and values would be a new object in each pass, so a recompilation; it
        # isn't read.
        return LayerCall(0, self._training, args, kwargs).without_caches().run()

    def __reduce__(self) -> tuple[Any, ...]:
        # Compiled code can't be pickled, so a copy of the layer runs uncompiled.
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
    """Indices of the layers that recompute all but matrix products and attention. In compiled
    layers these can't be told apart from the rest, so such layers are recomputed as a whole."""
    measured: MeasuredLayer | None = None
    """The layer whose saved bytes are counted, and which isn't recomputed; None once they are
    known."""

    def run(
        self, call: LayerCall, layer: nn.Module, hidden: int | str | None, products: KeptProducts
    ) -> Any:
        """Run a layer in the forward pass, and return its output.

        If the model itself checkpoints the layer, it isn't checkpointed a second time.
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
    """Run a layer and report the bytes that it keeps, without weights and what all layers share."""
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
    """Return the pack and unpack hooks of saved tensors that are set now, or None."""
    hooks: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def _is_checkpointed() -> bool:
    """Whether this runs inside `torch.utils.checkpoint`, which keeps no activations."""
    hooks = _saving_hooks()
    return hooks is not None and hooks[0].__module__ == checkpoint.__module__
