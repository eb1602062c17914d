"""Send to later stages what layers return beside the hidden state: losses, router logits, biases.

The stage that runs a layer describes the layer's output: the hidden state, arguments of the layer,
plain data, and other tensors. These other tensors, the *side tensors*, travel with the hidden
state, and their gradients travel back. Stages that skip the layer rebuild the same output, with an
unknown tensor for the hidden state. Outputs of submodules that a Hugging Face model records travel,
too, if they are smaller than the hidden state; larger ones are unknown on later stages.

Nothing else travels, so the use of anything else must not go unnoticed. Tensors and numbers that a
layer keeps as attributes are unknown on stages that skip the layer: those with gradients, and those
that each pass replaces, unlike caches. Tensors with gradients in lists and dicts are refused; hooks
inside a skipped layer get unknown tensors.
"""

import pickle
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_hetero.core.errors import ModelError, StepError
from lightning_hetero.runtime.stage.activations import Handover
from lightning_hetero.runtime.stage.messages import pickled, unpickled
from lightning_hetero.runtime.stage.microbatch_pass import in_place_between
from lightning_hetero.runtime.stage.recomputation import LayerCall, hidden_output
from lightning_hetero.runtime.unknown import Origin, Unknown, tensors_in

_ONE_STAGE = "or use a plan whose pipelines have one stage."
_OF_HIDDEN = (
    "Another stage computes it, and here only the next layer may take it, as its hidden state. "
    f"Compute what needs it inside the layers, {_ONE_STAGE}"
)
_OF_SIDE = (
    "Another stage computes it, and it is too large to travel beside the hidden state, or no plain "
    f"data. Return less, such as a mean, {_ONE_STAGE}"
)
_OF_KEPT = f"Return it from the layer, {_ONE_STAGE}"
_HIDDEN = ""
"""Name of the hidden state in the description of an output, where arguments have their own
names."""
_RECORDER = "transformers.utils.output_capturing"
"""The module whose hooks record outputs of submodules."""
_HARMLESS = ("torch.", _RECORDER)
"""Prefixes of modules whose hooks are allowed: they compute weights, or record what travels."""
_PLAIN = frozenset((bool, str, int, float, type(None), torch.dtype, torch.device))
_TORCHS_OWN = frozenset(vars(nn.Module()))
_MOST_LOOKS = 16
"""Number of passes of a layer, with and without gradients, in which its attributes are compared
before and after. The passes of the check of the loss are among them."""
_Attributes = dict[tuple[int, str], Any]
"""Values of attributes, by index of the submodule and name."""


class SideTensors:
    """Describes the outputs of layers, and rebuilds them on stages that skip the layers."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._parts = [[*layer.modules()] for layer in layers]
        # Only hooks on submodules: a layer's own hooks run around its wrapped forward in any case.
        self._hooks = [
            [
                (part, hooks)
                for part in parts[1:]
                for hooks in (part._forward_pre_hooks, part._forward_hooks)
            ]
            for parts in self._parts
        ]
        self._hooks_alone = [[hooks for _, hooks in pairs] for pairs in self._hooks]
        self._kept: list[dict[tuple[int, str], None]] = [{} for _ in layers]
        """For each layer the attributes whose values each pass replaces."""
        self._num_looks: Counter[tuple[int, bool]] = Counter()
        """The number of passes in which a layer's attributes were compared, with gradients or
        without."""

    def before(self, index: int) -> tuple[dict[str, int], _Attributes | None]:
        """Look at a layer before it runs.

        Returns how many outputs of each kind a Hugging Face model has recorded so far in this pass,
        and the layer's attributes, if they are to be compared.
        """
        recorded = {key: len(items) for key, items in _recorded().items()}
        kind = index, torch.is_grad_enabled()
        if self._num_looks[kind] == _MOST_LOOKS:
            return recorded, None
        self._num_looks[kind] += 1
        parts = enumerate(self._parts[index])
        return recorded, {(at, name): i for at, part in parts for name, i in vars(part).items()}

    def note(
        self,
        before: tuple[dict[str, int], _Attributes | None],
        call: LayerCall,
        output: Any,
        whole: Tensor,
        handover: Handover,
    ) -> None:
        """Add to a handover what a layer has returned and recorded, with its tensors.

        `before` is what the method of that name returned. Only records that are smaller than the
        `whole` hidden state travel. The handover is changed in place.
        """
        num_recorded, attributes = before
        parts, own = self._parts[call.index], self._kept[call.index]
        if attributes is not None:
            own |= dict.fromkeys(_replaced(call.index, attributes, parts))
        kept = []
        for place, name in own:
            value = getattr(parts[place], name)
            if isinstance(value, Tensor | float):
                kept.append((place, name, _shape(value), getattr(value, "dtype", torch.float32)))
        handover.tensors[:1] = [whole]
        handover.forms.append((tuple(whole.shape), whole.dtype))
        records = {}
        for key, items in _recorded().items():
            new = items[num_recorded.get(key, 0) :]
            added = [_dump(item, handover.tensors) for item in new]
            records.update({key: added} if added else {})
        returned = None
        if type(output) is not Tensor:
            given: dict[int, int | str] = {
                id(value): key for key, value in call.given.items() if type(value) not in _PLAIN
            }
            given[id(hidden_output(output, call.index))] = _HIDDEN
            returned = [_dump(item, handover.tensors, given) for item in output]
        is_any = returned or records or kept
        handover.layer_outputs.append(pickle.dumps((returned, records, kept)) if is_any else b"")

    def skip(self, call: LayerCall, hidden: int | str, handover: Handover) -> Any:
        """Return what a layer has returned on an earlier stage, and record what it has recorded.

        Raises:
            ModelError: Hooks inside the layer need values.
        """
        index, device = call.index, call.given[hidden].device
        self._show_hooks(index)
        origin = Origin(f"the output of layer {index}", _OF_HIDDEN)
        made = Unknown.of(*handover.forms[index], device, origin, in_place_between(index))
        if not handover.layer_outputs[index]:
            return made
        items, records, kept = pickle.loads(handover.layer_outputs[index])
        for place, name, shape, dtype in kept:
            origin = Origin(f"what layer {index} keeps in {name!r}", _OF_KEPT)
            known_by_shape = Unknown.of(shape, dtype, device, origin)
            setattr(self._parts[index][place], name, known_by_shape)
        for key, dumped in records.items():
            origin = Origin(f"what layer {index} records as {key!r}", _OF_SIDE)
            _recorded()[key] += [_load(item, handover.tensors, origin, {}) for item in dumped]
        if items is None:
            return made
        known, returned = call.given | {_HIDDEN: made}, []
        for position, item in enumerate(items):
            origin = Origin(f"output {position} of layer {index}", _OF_SIDE)
            returned.append(_load(item, handover.tensors, origin, known))
        return tuple(returned)

    def explain(self, error: AttributeError, run_here: range) -> None:
        """Raise StepError if a step reads what a layer on another stage keeps."""
        for index, parts in enumerate(self._parts):
            if index not in run_here and any(part is error.obj for part in parts):
                raise StepError(
                    f"The step needs what layer {index} keeps in {error.name!r}, and another stage "
                    f"computes it. {_OF_KEPT}"
                ) from error

    def _show_hooks(self, index: int) -> None:
        """Call the hooks inside a skipped layer with unknown tensors."""
        if not any(self._hooks_alone[index]):
            return
        unknown = _nothing_known(Origin(f"what layer {index} computes", _OF_HIDDEN))
        calls = [
            (hook, (part, (unknown,), *(() if hooks is part._forward_pre_hooks else (unknown,))))
            for part, hooks in self._hooks[index]
            for hook in hooks.values()
            if not str(getattr(hook, "__module__", "")).startswith(_HARMLESS)
        ]
        for hook, given in calls:
            try:
                hook(*given)
            except Exception as error:
                raise ModelError(
                    f"Layer {index} runs on another stage, and here hooks inside it see unknown "
                    f"tensors, on which they can't run: {error} Take the hooks out, {_ONE_STAGE}"
                ) from error


def refuse_pieces(call: LayerCall, output: Any) -> None:
    """Refuse side tensors under sequence parallelism: each rank has those of its tokens only."""
    given = set(map(id, call.given.values()))
    others = [] if type(output) is Tensor else [i for i in output[1:] if id(i) not in given]
    if any(isinstance(i, Tensor) and i.is_floating_point() for i in tree_leaves(others)):
        raise ModelError(
            f"Layer {call.index} returns tensors beside its hidden state. Under sequence "
            "parallelism each rank has those of its own tokens only. Use sequence_parallel=False."
        )


def _replaced(
    index: int, before: _Attributes, parts: Sequence[nn.Module]
) -> Iterator[tuple[int, str]]:
    """Yield the attributes whose values a layer has replaced, or which have gradients.

    A cache isn't among them: it stays the same object, or its shape grows.

    Raises:
        ModelError: The layer keeps tensors with gradients in lists or dicts.
    """
    places = ((at, part, *item) for at, part in enumerate(parts) for item in vars(part).items())
    for place, part, name, value in places:
        if _is_of_torch(part, name):
            continue
        has_gradients = any(tensor.grad_fn is not None for tensor in tensors_in(value))
        if isinstance(value, Tensor | float):
            old = before.get((place, name), value)
            is_like = isinstance(old, Tensor | float) and _shape(value) == _shape(old)
            if has_gradients or (value is not old and is_like):
                yield place, name
        elif has_gradients:
            raise ModelError(
                f"Layer {index} keeps tensors with gradients in {name!r} of a "
                f"{type(part).__name__}, where later stages don't find them. {_OF_KEPT}"
            )


def _shape(value: Tensor | float) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def _is_of_torch(part: nn.Module, name: str) -> bool:
    """Whether an attribute is `nn.Module`'s own, or a weight that `weight_norm` and its like make.

    Such a weight has parameters named after it.
    """
    return name in _TORCHS_OWN or any(key.startswith(f"{name}_") for key in part._parameters)


def _recorded() -> dict[str, list[Any]]:
    """Return the lists into which a Hugging Face model is recording outputs at this moment."""
    recorder = sys.modules.get(_RECORDER)
    found = None if recorder is None else recorder._active_collector.get()
    if not found:
        return {}
    return {key: item for key, item in found.items() if type(item) is list}


def _nothing_known(origin: Origin) -> Unknown:
    return Unknown.of((), torch.float32, torch.device("cpu"), origin)


def _dump(
    value: Any, sides: list[Tensor], given: Mapping[int, int | str] | None = None
) -> bytes | None:
    """Return a pickled value, in which tensors are replaced by their indices in `sides`.

    Returns None, and adds no tensors, if the value can't be pickled.

    Args:
        value: What a layer has returned or recorded.
        sides: The hidden state, then the side tensors; new tensors are appended.
        given: Names of the layer's arguments by `id`. Stages that skip the layer have these, too,
            so only the names travel. None for recorded outputs, of which large tensors don't
            travel.
    """
    known = {id(tensor): index for index, tensor in enumerate(sides) if index}
    new: list[Tensor] = []

    def name_of(item: Any) -> Any:
        if given is not None and id(item) in given:
            return (given[id(item)],)
        if isinstance(item, nn.Module):
            raise pickle.PicklingError("A module stays with its layer.")
        if not isinstance(item, Tensor):
            return None
        is_plain = type(item) is Tensor and item.layout is torch.strided and not item.is_nested
        if not is_plain or (given is None and item.numel() >= sides[0].numel()):
            shape = () if item.is_nested else tuple(item.shape)
            return shape, item.dtype, item.device.type
        if id(item) not in known:
            known[id(item)] = len(sides) + len(new)
            new.append(item)
        return known[id(item)], item.device.type

    found = pickled(value, name_of)
    sides += [] if found is None else new
    return found


def _load(
    data: bytes | None, sides: Sequence[Tensor], origin: Origin, given: Mapping[int | str, Any]
) -> Any:
    if data is None:
        return _nothing_known(origin)

    def object_of(name: Any) -> Any:
        if len(name) == 1:
            return given[name[0]]
        if len(name) == 3:
            shape, dtype, device = name
            return Unknown.of(shape, dtype, torch.device(device), origin)
        index, kind = name
        return sides[index].to(kind)

    return unpickled(data, object_of)
