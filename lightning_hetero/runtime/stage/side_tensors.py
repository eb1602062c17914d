"""Hand on what layers return and leave beside the hidden state: losses, router logits, biases.

The stage that runs a layer describes its output: the hidden state, arguments of the layer, plain
data, and other tensors, which travel beside the hidden state; their gradients travel back. Stages
that skip the layer return the same, with an unknown hidden state.

A layer may also leave something on its modules, as attributes, in lists or in dicts; and Hugging
Face models record outputs of submodules if asked to. Such leavings are noted, place by place, and
put into the same places by stages that skip the layer. Of these, tensors travel that are smaller
than the hidden state. Later stages get an unknown tensor for larger ones, and for objects that
can't be pickled.

What layers leave elsewhere, in lists that others keep or by hooks inside them, doesn't travel. So
that nobody misses it unnoticed, a skipped layer runs on unknown tensors: each time if it has hooks
inside, else once.
"""

import io
import pickle
import sys
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_hetero.core.errors import ModelError
from lightning_hetero.runtime.random_state import PreservedRandomState
from lightning_hetero.runtime.stage.activations import Handover
from lightning_hetero.runtime.stage.layer_calls import LayerCall, hidden_output
from lightning_hetero.runtime.stage.microbatch_pass import in_place_between
from lightning_hetero.runtime.stage.places import Place, Places
from lightning_hetero.runtime.stage.quantized_calls import without_quantized_values
from lightning_hetero.runtime.unknown import Origin, Unknown

__all__ = ["LayerLeavings"]

_ONE_STAGE = "or use a plan whose pipelines have one stage."
_OF_HIDDEN = (
    "Another stage computes it, and here only the next layer may take it, as its hidden state. "
    f"Compute what needs it inside the layers, {_ONE_STAGE}"
)
_OF_SIDE = (
    "Another stage computes it, and it is too large to travel beside the hidden state, or no plain "
    f"data. Leave less, such as a mean, {_ONE_STAGE}"
)
_HIDDEN = ""
"""Names the hidden state among what an output is made of, where arguments have theirs."""
_RECORDED = ("", "recorded")
_RECORDER = "transformers.utils.output_capturing"
"""The module whose hooks record outputs of submodules."""
_PLAIN = frozenset((bool, str, int, float, type(None), torch.dtype, torch.device))


class LayerLeavings:
    """Describes what layers return and leave, and makes it again where they are skipped.

    Args:
        layers: The model's layers in order.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = tuple(layers)
        self._modules = [[*layer.modules()] for layer in layers]
        self._names = [_names_of(layer) for layer in layers]
        # Only hooks inside: a layer's own hooks run around its forward in any case.
        self._hooks = [
            [
                hooks
                for part in parts[1:]
                for hooks in (part._forward_hooks, part._forward_pre_hooks)
            ]
            for parts in self._modules
        ]
        self._last: dict[int, tuple[dict[str, Any] | None, Places]] = {}
        """Where outputs were recorded, and reusable results of `look`: of layers that have left
        nothing since."""
        self._tried: set[tuple[int, bool]] = set()
        """Layers that have run on unknown tensors, each with its mode."""

    def look(self, index: int, *, anew: bool = False) -> Places:
        """Return the contents of layer `index`'s places, before it runs or is skipped.

        Args:
            index: The layer's index.
            anew: Whether torch's own attributes must be as they are now, for `Places.undo`.
        """
        recorded = _recorded_outputs()
        seen, last = self._last.get(index, (None, None))
        is_known = last is not None and seen is recorded and not anew
        if last is None or not is_known or last.with_contents or not last.are_same():
            modules = self._modules[index]
            places = [*map(vars, modules), *map(_buffers_of, modules)]
            places += [] if recorded is None else [recorded]
            last = Places(dict(zip(self._names[index], places, strict=False)))
            self._last[index] = recorded, last
        return last

    def note(
        self, before: Places, call: LayerCall, output: Any, whole: Tensor, handover: Handover
    ) -> None:
        """Add to a handover what a layer has returned and left, with its tensors.

        Args:
            before: What `look` returned before the layer ran.
            call: The layer's call.
            output: What it returned.
            whole: Its whole hidden state; leavings that aren't smaller don't travel.
            handover: Changed in place.
        """
        handover.tensors[:1] = [whole]
        handover.forms.append((tuple(whole.shape), whole.dtype))
        changes = self._changes(call.index, before)
        left = [(place, name, _dump(change, handover.tensors)) for place, name, change in changes]
        items = None
        if type(output) is not Tensor:
            given: dict[int, int | str] = {
                id(value): key for key, value in call.given.items() if type(value) not in _PLAIN
            }
            given[id(hidden_output(output, call.index))] = _HIDDEN
            items = [_dump(item, handover.tensors, given) for item in output]
        handover.left.append(pickle.dumps((items, left)) if items or left else b"")

    def skip(self, call: LayerCall, hidden: int | str, handover: Handover) -> Any:
        """Return what a layer has returned on an earlier stage, and leave what it has left.

        Args:
            call: The layer's call here.
            hidden: Which of its arguments is the hidden state.
            handover: The handover from the stage before.

        Raises:
            ModelError: Hooks inside the layer need values.
        """
        index, device = call.index, call.argument(hidden).device
        self._run_unknown(call, hidden)
        origin = Origin(f"the output of layer {index}", _OF_HIDDEN)
        made = Unknown.of(*handover.forms[index], device, origin, in_place_between(index))
        if not handover.left[index]:
            return made
        items, left = pickle.loads(handover.left[index])
        places = self.look(index).all if left else {}
        self._last.pop(index, None)
        for place, name, data in left:
            origin = Origin(f"what layer {index} leaves in {name!r}", _OF_SIDE)
            change = ("put", _nothing_known(origin))
            if data is not None:
                change = _load(data, handover.tensors, origin, {})
            places[place].apply(("change", {name: change}))
        if items is None:
            return made
        known, returned = call.given | {_HIDDEN: made}, []
        for position, item in enumerate(items):
            origin = Origin(f"output {position} of layer {index}", _OF_SIDE)
            is_told = item is not None
            returned.append(
                _load(item, handover.tensors, origin, known) if is_told else _nothing_known(origin)
            )
        return tuple(returned)

    def _run_unknown(self, call: LayerCall, hidden: int | str) -> None:
        """Let hooks, and lists that others keep, see unknown tensors of a skipped layer."""
        layer, has_hooks = self._layers[call.index], self._has_hooks(call.index)
        key = call.index, layer.training
        if key in self._tried and not has_hooks:
            return
        self._tried.add(key)
        origin = Origin(f"what layer {call.index} computes", _OF_HIDDEN)
        call = call.without_caches()
        call = call.with_argument(hidden, Unknown.like(call.argument(hidden), origin))
        before = self.look(call.index, anew=True)
        held: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (tensors, dict(tensors))
            for part in self._modules[call.index]
            for tensors in (part._parameters, part._buffers)
        ]
        try:
            # Eager: code that is compiled for unknown tensors would be of no use later.
            with (
                PreservedRandomState(),
                torch.no_grad(),
                torch.compiler.set_stance("force_eager"),
                without_quantized_values(layer),
            ):
                for tensors, known in held:
                    told = {name: item for name, item in known.items() if item is not None}
                    tensors.update({name: Unknown.like(told[name], origin) for name in told})
                call.run()
        except Exception as error:
            # Without hooks only code that needs values, as experts do, ends here.
            if has_hooks:
                raise ModelError(
                    f"Layer {call.index} runs on another stage, and here hooks inside it would "
                    f"see unknown tensors, on which it can't run: {error} Take the hooks out, "
                    f"{_ONE_STAGE}"
                ) from error
        finally:
            for tensors, known in held:
                tensors.update(known)
            before.undo()

    def _has_hooks(self, index: int) -> bool:
        """Whether hooks inside the layer may look at what it computes."""
        return any(self._hooks[index]) and any(
            getattr(hook, "__module__", None) != _RECORDER
            for hooks in self._hooks[index]
            for hook in hooks.values()
        )

    def refuse_pieces(self, call: LayerCall, before: Places, output: Any) -> None:
        """Refuse other tensors that a layer has returned or left: they are of a rank's tokens."""
        given = set(map(id, call.values))
        found = [(name, change) for _, name, change in self._changes(call.index, before)]
        if type(output) is not Tensor:
            found += [("its output", item) for item in output[1:] if id(item) not in given]
        for name, value in found:
            if any(isinstance(i, Tensor) and i.is_floating_point() for i in tree_leaves(value)):
                raise ModelError(
                    f"Layer {call.index} leaves tensors in {name!r} beside its hidden state. Under "
                    "sequence parallelism each rank has those of its own tokens only. Use "
                    "sequence_parallel=False."
                )

    def _changes(self, index: int, before: Places) -> Sequence[tuple[Place, str, tuple[str, Any]]]:
        """Return (place, name, change) of all that a layer has left since `before`."""
        is_same = before.are_same()
        if is_same and not before.with_contents:
            return ()
        self._last.pop(index, None)  # What it has taken out is held by nobody.
        found = []
        for place, seen in (before.with_contents if is_same else before.all).items():
            _, changes = seen.change_to(seen.value) or ("", {})
            found += [(place, name, change) for name, change in changes.items()]
        return found


_buffers_of = attrgetter("_buffers")


def _names_of(layer: nn.Module) -> list[tuple[str, str]]:
    """Return the names of a layer's places: attributes, then buffers, then recorded outputs."""
    paths = [path for path, _ in layer.named_modules()]
    kinds = ("attributes", "buffers")
    return [(path, kind) for kind in kinds for path in paths] + [_RECORDED]


def _recorded_outputs() -> dict[str, Any] | None:
    """Return the dict in which a Hugging Face model records outputs now; None if none does."""
    recorder = sys.modules.get(_RECORDER)
    found: dict[str, Any] | None = None if recorder is None else recorder._active_collector.get()
    return found


def _nothing_known(origin: Origin) -> Unknown:
    return Unknown.of((), torch.float32, torch.device("cpu"), origin)


def _dump(
    value: Any, sides: list[Tensor], given: Mapping[int, int | str] | None = None
) -> bytes | None:
    """Return a pickled value, with its tensors as indices into `sides`.

    Returns None, and adds no tensors, if the value can't be pickled.

    Args:
        value: What a layer has returned or left.
        sides: The hidden state, then the side tensors; new tensors are appended.
        given: Names of objects that stages have that skip the layer, by identity; None for
            leavings, of which large tensors don't travel.
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

    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.persistent_id = name_of  # type: ignore[method-assign]
    try:
        pickler.dump(value)
    except Exception:  # Whatever an object's own pickling may raise.
        return None
    sides += new
    return file.getvalue()


def _load(
    data: bytes, sides: Sequence[Tensor], origin: Origin, given: Mapping[int | str, Any]
) -> Any:
    def object_of(name: Any) -> Any:
        if len(name) == 1:
            return given[name[0]]
        if len(name) == 3:
            shape, dtype, device = name
            return Unknown.of(shape, dtype, torch.device(device), origin)
        index, kind = name
        return sides[index].to(kind)

    unpickler = pickle.Unpickler(io.BytesIO(data))
    unpickler.persistent_load = object_of  # type: ignore[method-assign]
    return unpickler.load()
