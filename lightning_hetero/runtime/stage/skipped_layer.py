"""Return on this stage what a layer of another stage would return: tensors with unknown values.

A layer is run once for each way of being called, on unknown weights, to see what it returns besides
the hidden state. From then on such stand-ins are returned without running it. A layer that leaves
tensors where `LayerLeavings` doesn't see them, in lists elsewhere or through hooks inside it, runs
on unknown weights each time: code that uses these gets unknown tensors, and is refused.
"""

import copy
import gc
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from lightning_hetero.core.errors import HeteroError, ModelError
from lightning_hetero.runtime.leaves import tree_leaves
from lightning_hetero.runtime.random_state import PreservedRandomState
from lightning_hetero.runtime.stage.activations import HiddenForm
from lightning_hetero.runtime.stage.layer_calls import LayerCall, hidden_output, is_cache
from lightning_hetero.runtime.stage.microbatch_pass import in_place_between
from lightning_hetero.runtime.stage.quantized_calls import without_quantized_values
from lightning_hetero.runtime.stage.side_tensors import RECORDER, LayerLeavings
from lightning_hetero.runtime.unknown import Origin, Unknown

__all__ = ["SkippedLayer"]

_REMEDY = (
    "Another stage computes it, and here only the next layer may take it, as its hidden state. "
    "Compute what needs it inside the layers, or use a plan whose pipelines have one stage."
)
_SIMPLE = (bool, str, type(None), torch.dtype)
_TENSORS = (Tensor, Unknown)
_PLAIN = (*_SIMPLE, int, torch.device)


@dataclass(frozen=True)
class _Given:
    """Stands for an argument that the layer returns."""

    argument: int | str


class _Hidden:
    """Stands for a hidden state with the shape and dtype of the layer's input."""


@dataclass(frozen=True)
class _Made:
    """Stands for a tensor with another shape or dtype."""

    meta: Tensor
    position: int | None
    """Its place in the output; None for the hidden state."""


class SkippedLayer:
    """Stands in for a layer where another stage runs it.

    Args:
        layer: The layer, its parameters still whole.
        index: The layer's index.
        leavings: Finds what the layer leaves on its modules.
    """

    def __init__(self, layer: nn.Module, index: int, leavings: LayerLeavings) -> None:
        self._layer = layer
        self._index = index
        self._leavings = leavings
        self._origin = Origin(f"the output of layer {index}", _REMEDY)
        self._sealed = in_place_between(index)
        # Only hooks inside: the layer's own hooks run around its forward in any case.
        _, *inside = layer.modules()
        self._hooks = [
            hooks for item in inside for hooks in (item._forward_hooks, item._forward_pre_hooks)
        ]
        self._shapes = {name: tuple(item.shape) for name, item in layer.named_parameters()}
        self._outputs: dict[Any, Any] = {}
        self._never_cached: set[Any] = set()
        """Kinds of calls in which the layer leaves tensors elsewhere, so it is run each time."""

    def __call__(self, call: LayerCall, hidden: Tensor, made: HiddenForm | None = None) -> Any:
        """Return what the layer would return for a call, with unknown values.

        Args:
            call: The call.
            hidden: The hidden state among its arguments.
            made: Shape and dtype of the hidden state that it returns; None if unknown.

        Raises:
            ModelError: What the layer would return or leave can't be predicted.
        """
        kinds = [_kind_of(value) for value in call.args]
        if call.kwargs:
            kinds += [(name, _kind_of(value)) for name, value in call.kwargs.items()]
        key = self._layer.training, torch.is_grad_enabled(), self._has_hooks(), *kinds
        output = self._outputs.get(key)
        if type(output) is _Hidden:
            return self._made_hidden(made or (tuple(hidden.shape), hidden.dtype), hidden.device)
        if output is None:
            output = self._of_sizes(call, hidden, key)
        return tree_map(lambda item: self._stand_in(item, call.given, hidden, made), output)

    def _of_sizes(self, call: LayerCall, hidden: Tensor, key: Any) -> Any:
        """Return stand-ins for a call's output, cached by sizes if the output depends on them."""
        leaves = tree_leaves(call.given)
        sizes = tuple(i.shape if isinstance(i, Tensor) else i for i in leaves if _has_size(i))
        output = self._outputs.get((key, sizes))
        if output is None:
            uncompiled = torch.compiler.set_stance("force_eager")
            with PreservedRandomState(), torch.no_grad(), uncompiled:
                output = self._observe(call, hidden, key)
            if key not in self._never_cached:
                has_sizes = any(isinstance(i, _Made) or type(i) is int for i in tree_leaves(output))
                self._outputs[(key, sizes) if has_sizes else key] = output
        return output

    def _has_hooks(self) -> bool:
        """Whether hooks inside the layer may look at what it computes."""
        return any(self._hooks) and any(
            getattr(hook, "__module__", None) != RECORDER
            for hooks in self._hooks
            for hook in hooks.values()
        )

    def _stand_in(
        self, item: Any, given: Mapping[int | str, Any], hidden: Tensor, made: HiddenForm | None
    ) -> Any:
        if isinstance(item, _Given):
            return given[item.argument]
        if isinstance(item, _Hidden):
            return self._made_hidden(made or (tuple(hidden.shape), hidden.dtype), hidden.device)
        if isinstance(item, _Made):
            form = tuple(item.meta.shape), item.meta.dtype
            if item.position is None:
                return self._made_hidden(made or form, hidden.device)
            what = f"output {item.position} of layer {self._index}"
            return Unknown.of(*form, hidden.device, Origin(what, _REMEDY))
        return item

    def _made_hidden(self, form: HiddenForm, device: torch.device) -> Unknown:
        return Unknown.of(*form, device, self._origin, self._sealed)

    def _observe(self, call: LayerCall, hidden: Tensor, key: Any) -> Any:
        """Return stand-ins for a call's output; note whether the layer leaves tensors elsewhere."""
        if key in self._never_cached:
            return self._run(call, hidden, on_zeros=False)[0]
        try:
            output, made = self._run(call, hidden, on_zeros=False)
        except Exception:
            # It needs values, as experts do. Zeros show the shapes, but take a layer's memory.
            if self._has_hooks():
                self._refuse_to_foretell("hooks inside it look at what it computes")
            try:
                output, made = self._run(call, hidden, on_zeros=True)
            except HeteroError:
                raise
            except Exception as error:
                raise ModelError(
                    f"Layer {self._index} runs on another stage, and can't be run on zeros, to "
                    f"see what it returns: {type(error).__name__}: {error}. Use a plan whose "
                    "pipelines have one stage."
                ) from error
            if made.any_alive(unknown_only=False):
                self._refuse_to_foretell("it leaves tensors in somebody's list")
            return output
        if self._has_hooks() or made.any_alive(unknown_only=True):
            self._never_cached.add(key)
        return output

    def _refuse_to_foretell(self, why: str) -> NoReturn:
        raise ModelError(
            f"Layer {self._index} runs on another stage and computes by values, and {why}, where "
            "this stage would miss them. Take that out, or use a plan whose pipelines have one "
            "stage."
        )

    def _run(self, call: LayerCall, hidden: Tensor, *, on_zeros: bool) -> tuple[Any, "_Tracking"]:
        origin, device = Origin(f"what layer {self._index} computes", _REMEDY), hidden.device
        is_number = hidden.is_floating_point() or hidden.is_complex()
        dtype = hidden.dtype if is_number else torch.get_default_dtype()
        state: dict[str, Tensor] = {}
        for name, shape in self._shapes.items():
            known = torch.zeros(shape if on_zeros else (), dtype=dtype, device=device)
            state[name] = known if on_zeros else Unknown.of(shape, dtype, device, origin)
        for name, buffer in self._layer.named_buffers():
            state[name] = buffer.clone() if on_zeros else Unknown.like(buffer, origin)
        before = self._leavings.look_anew(self._index)
        try:
            # Eager: if compiled code met the tracking, the layer would stay uncompiled for good.
            with (
                torch.compiler.set_stance("force_eager"),
                _Tracking() as made,
                without_quantized_values(self._layer),
                _reparametrize_module(self._layer, state),
            ):
                output = _described_output(call, hidden, on_zeros=on_zeros)
        finally:
            self._leavings.undo(before)
        state.clear()
        return output, made


def _described_output(call: LayerCall, hidden: Tensor, *, on_zeros: bool) -> Any:
    """Run the layer and return stand-ins for its output."""
    given = {key: _argument_of(value, on_zeros) for key, value in call.given.items()}
    args = [given[key] for key in range(len(call.args))]
    output = call.forward(*args, **{name: given[name] for name in call.kwargs})
    keys = {id(v): key for key, v in given.items() if not isinstance(v, _PLAIN)}

    def describe(item: Any, position: int | None) -> Any:
        if position is not None and id(item) in keys:
            return _Given(keys[id(item)])
        if isinstance(item, Tensor):
            has_same_form = item.shape == hidden.shape and item.dtype == hidden.dtype
            if position is None and has_same_form:
                return _Hidden()
            return _Made(torch.empty(item.shape, dtype=item.dtype, device="meta"), position)
        if isinstance(item, _PLAIN):
            return item
        raise ModelError(
            f"A layer returns {type(item).__name__} besides the hidden state, which later stages "
            "can't know. Return tensors, or use a plan whose pipelines have one stage."
        )

    if isinstance(output, Tensor):
        return describe(output, None)
    hidden_output(output, call.index)
    return tuple(
        tree_map(lambda leaf, position=position: describe(leaf, position or None), item)
        for position, item in enumerate(output)
    )


class _Tracking(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the tensors that operations make, without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation."""
        made = func(*args, **(kwargs or {}))
        for item in made if isinstance(made, list | tuple) else (made,):
            if isinstance(item, Tensor):
                self._made.append(weakref.ref(item))
        return made

    def any_alive(self, *, unknown_only: bool) -> bool:
        """Return whether any of these tensors is still referenced."""

        def alive() -> bool:
            found = [item for made in self._made if (item := made()) is not None]
            return any(
                isinstance(item, Unknown)
                if unknown_only
                else item.is_floating_point() and not item.is_meta
                for item in found
            )

        # Tensors that are only in a reference cycle don't count.
        return alive() and gc.collect() >= 0 and alive()


def _has_size(value: Any) -> bool:
    return isinstance(value, Tensor) or type(value) is int


def _kind_of(value: Any) -> Any:
    """Return the part of an argument, besides shapes, that a layer's output may depend on."""
    if type(value) in _TENSORS:
        return type(value)
    return (type(value), value) if isinstance(value, _SIMPLE) else type(value)


def _argument_of(value: Any, on_zeros: bool) -> Any:  # noqa: FBT001 - inside only
    if isinstance(value, Unknown):
        if on_zeros:
            return torch.zeros(value.shape, dtype=value.dtype, device=value.device)
        # Not sealed: a layer may change its input in place, though code between layers may not.
        return Unknown.like(value, value.origin)
    # A copy, since the layer writes into a cache of keys and values.
    return copy.deepcopy(value) if is_cache(value) else value
