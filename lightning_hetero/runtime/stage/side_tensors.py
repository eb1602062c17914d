"""Carry what layers leave beside their outputs to later stages: losses, router logits.

A layer may return tensors besides the hidden state and leave some on its modules, as attributes, in
lists or in dicts; and Hugging Face models record outputs of submodules if asked to. Later layers,
and code after them on the last stage, then read these. So what each layer leaves is noted, place by
place, and stages that skip the layer put it into the same places. The tensors travel beside the
hidden state, and their gradients back.

A tensor travels if it is smaller than the hidden state, or if a layer returned it and the next
layer of the stage took it as an argument, as in T5 the position bias. For other larger tensors, and
for objects that can't be pickled, later stages get an unknown tensor.
"""

import io
import pickle
import sys
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_hetero.core.errors import ModelError
from lightning_hetero.runtime.held_values import HeldItems
from lightning_hetero.runtime.stage.activations import Handover
from lightning_hetero.runtime.unknown import Origin, Unknown

__all__ = ["RECORDER", "LayerLeavings", "Spaces"]

_REMEDY = (
    "Another stage computes it, and it is too large to travel beside the hidden state, or no plain "
    "data. Leave less, such as a mean, or use a plan whose pipelines have one stage."
)
_REST = "the rest of its output"
_RECORDED = ("", "recorded")
RECORDER = "transformers.utils.output_capturing"
"""The module whose hooks record outputs of submodules."""
_CONTAINERS = frozenset((list, dict))
_INTERNAL = frozenset(vars(nn.Module())) | {"forward"}
"""Attributes that torch itself reads: hooks, parameters and the like."""
_UNWATCHED = _INTERNAL - {"_buffers"}  # Which is a place of its own.

Rest = tuple[Any, ...]
"""Everything that a layer returns besides the hidden state."""


class _Space(NamedTuple):
    """A place where a layer may leave something, as it was at one time."""

    name: tuple[str, str]
    """(path of the module inside the layer, kind of place)."""
    names: dict[str, Any]
    """The place itself: values by name."""
    before: dict[str, Any]
    inside: dict[str, "_Seen"]
    """The lists and dicts in it."""

    def changes(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, change) for each value in it that has changed."""
        for name, value in self.names.items():
            same = self.before.get(name, _NOTHING) is value and name not in self.inside
            change = None if same or name in _INTERNAL else self.seen(name).change_to(value)
            if change is not None:
                yield name, change

    def seen(self, name: str) -> "_Seen":
        """Return the earlier value at a name."""
        return self.inside.get(name) or _Seen(self.before.get(name, _NOTHING))


class Spaces(HeldItems):
    """All places where one layer may leave something, as they were at one time.

    A layer has two for each of its modules, with dozens of values, most of which never change. So
    all are compared at once, and looked at one by one only where any has changed.

    Args:
        index: Index of the layer.
        named: (name, place) of each.
    """

    def __init__(self, index: int, named: Sequence[tuple[tuple[str, str], dict[str, Any]]]) -> None:
        super().__init__((names for _, names in named), without=_UNWATCHED)
        self.index = index
        self.all = [_space(name, names) for name, names in named]
        """One `_Space` for each place."""
        self.recorded = named[-1][1] if named[-1][0] == _RECORDED else None
        """The place of recorded outputs, if there is one."""
        self.with_contents = [space for space in self.all if space.inside]
        """The places with lists or dicts, whose contents may change unnoticed."""

    def changed(self) -> list[_Space]:
        """Return the places in which anything may have changed since."""
        return self.with_contents if self.are_same() else self.all


class LayerLeavings:
    """Notes what the layers of a module leave beside their outputs, and restores it elsewhere.

    Args:
        layers: The model's layers in order.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._modules = [[*layer.modules()] for layer in layers]
        self._names = [_names_of(layer) for layer in layers]
        self._last: dict[int, Spaces] = {}
        """Reusable results of `look`: of layers that have left nothing since."""

    def look(self, index: int) -> Spaces:
        """Return the contents of layer `index`'s places, before it runs or is skipped."""
        last = self._last.get(index)
        is_known = last is not None and last.recorded is _recorded_outputs()
        if last is None or not is_known or last.with_contents or not last.are_same():
            last = self.look_anew(index)
        return last

    def look_anew(self, index: int) -> Spaces:
        """Return the same with torch's own attributes as they are now, too, as `undo` needs it."""
        modules, recorded = self._modules[index], _recorded_outputs()
        places = [*map(vars, modules), *map(_buffers_of, modules)]
        places += [] if recorded is None else [recorded]
        made = Spaces(index, [*zip(self._names[index], places, strict=False)])
        self._last[index] = made
        return made

    def note(self, before: Spaces, hidden: Tensor, rest: Rest, handover: Handover) -> None:
        """Add to a handover what a layer has left since `before`, with its tensors.

        Args:
            before: What `look` returned before the layer ran.
            hidden: The layer's whole hidden state; tensors that aren't smaller don't travel.
            rest: What the layer returned besides; None in place of its arguments.
            handover: Changed in place.
        """
        handover.tensors[:1] = [hidden]
        handover.forms.append((tuple(hidden.shape), hidden.dtype))
        has_left = bool(rest or before.with_contents) or not before.are_same()
        handover.left.append(self._dumped(before, rest, handover.tensors) if has_left else b"")
        is_kept = bool(rest) and any(_is_large(item, hidden) for item in tree_leaves(rest))
        handover.kept = rest if is_kept else ()

    def _dumped(self, before: Spaces, rest: Rest, sides: list[Tensor]) -> bytes:
        left = [
            (space.name, name, _dump(change, sides))
            for space in self._changed(before, rest)
            for name, change in space.changes()
        ]
        return pickle.dumps(left) if left else b""

    def hand_on(self, values: Sequence[Any], handover: Handover) -> None:
        """Let everything that the last layer returned travel, if the next call takes any of it.

        Args:
            values: The arguments of that call.
            handover: Changed in place.
        """
        returned = [item for item in tree_leaves(handover.kept) if isinstance(item, Tensor)]
        if any(item is value for item in returned for value in values):
            left = [entry for entry in pickle.loads(handover.left[-1]) if entry[1] != _REST]
            whole = _dump(("put", handover.kept), handover.tensors, all_travel=True)
            left.append((_rest_space(()).name, _REST, whole))
            handover.left[-1] = pickle.dumps(left)
        handover.kept = ()

    def restore(self, index: int, before: Spaces, rest: Rest, handover: Handover) -> Rest:
        """Put what layer `index` left on an earlier stage into its places here.

        Args:
            index: The layer's index.
            before: What `look` returned before the layer was skipped.
            rest: What skipping it returned besides the hidden state.
            handover: The handover from the stage before.

        Returns:
            `rest`, with received tensors in place of unknown ones.
        """
        returned = _rest_space(())
        spaces = {space.name: space for space in (*before.all, returned)}
        self._last.pop(index, None)
        for where, name, data in pickle.loads(handover.left[index]):
            space = spaces[where]
            origin = Origin(f"what layer {index} leaves in {name!r}", _REMEDY)
            if data is None:
                change = "put", Unknown.of((), torch.float32, torch.device("cpu"), origin)
            else:
                change = _load(data, handover.tensors, origin)
            space.seen(name).apply(change, space.names, name)
        return _filled(rest, returned.names.get(_REST))

    def refuse_pieces(self, index: int, before: Spaces, rest: Rest) -> None:
        """Refuse tensors that layer `index` has left: they are of this rank's tokens only."""
        for space in self._changed(before, rest):
            for name, change in space.changes():
                if any(
                    isinstance(i, Tensor) and i.is_floating_point() for i in tree_leaves(change)
                ):
                    raise ModelError(
                        f"Layer {index} leaves tensors in {name!r} beside its output. Under "
                        "sequence parallelism each rank has those of its own tokens only. Use "
                        "sequence_parallel=False."
                    )

    def undo(self, before: Spaces) -> None:
        """Restore all places to what `look_anew` found there."""
        for space in before.all:
            for name in space.names.keys() - space.before.keys():
                del space.names[name]
            space.names.update(space.before)
            for seen in space.inside.values():
                seen.undo()

    def _changed(self, before: Spaces, rest: Rest) -> Iterator[_Space]:
        """Yield the places where anything may have changed, last the rest of the output."""
        changed = before.changed()
        if changed:
            self._last.pop(before.index, None)  # What it has taken out is held by nobody.
        yield from changed
        if rest:
            yield _rest_space(rest)


_buffers_of = attrgetter("_buffers")


def _names_of(layer: nn.Module) -> list[tuple[str, str]]:
    """Return the names of a layer's places: attributes, then buffers, then recorded outputs."""
    paths = [path for path, _ in layer.named_modules()]
    kinds = ("attributes", "buffers")
    return [(path, kind) for kind in kinds for path in paths] + [_RECORDED]


def _recorded_outputs() -> dict[str, Any] | None:
    """Return the dict in which a Hugging Face model records outputs now; None if none does."""
    recorder = sys.modules.get(RECORDER)
    found: dict[str, Any] | None = None if recorder is None else recorder._active_collector.get()
    return found


def _space(name: tuple[str, str], names: dict[str, Any]) -> _Space:
    inside = {
        key: _Seen(value)
        for key, value in names.items()
        if type(value) in _CONTAINERS and key not in _INTERNAL
    }
    return _Space(name, names, names.copy(), inside)


def _rest_space(rest: Rest) -> _Space:
    names = {_REST: rest} if any(isinstance(item, Tensor) for item in tree_leaves(rest)) else {}
    return _Space(("", _REST), names, {}, {})


def _filled(rest: Rest, returned: Any) -> Rest:
    items, form = tree_flatten(rest)
    others, other_form = tree_flatten(returned)
    if form != other_form:
        return rest
    pairs = zip(items, others, strict=True)
    filled: Rest = tree_unflatten(
        [b if isinstance(a, Unknown) and _is_known(b) else a for a, b in pairs], form
    )
    return filled


def _is_known(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, Unknown)


def _is_large(value: Any, hidden: Tensor) -> bool:
    return isinstance(value, Tensor) and value.numel() >= hidden.numel()


def _dump(value: Any, sides: list[Tensor], *, all_travel: bool = False) -> bytes | None:
    """Return a pickled value, with its tensors as indices into `sides`.

    Returns None, and adds no tensors, if the value can't be pickled.

    Args:
        value: What a layer has left.
        sides: The hidden state, then the side tensors; new tensors are appended.
        all_travel: Whether tensors travel that aren't smaller than the hidden state, too.
    """
    known = {id(tensor): index for index, tensor in enumerate(sides)}
    new: list[Tensor] = []

    def name_of(item: Any) -> Any:
        if isinstance(item, nn.Module):
            raise pickle.PicklingError("A module stays with its layer.")
        if not isinstance(item, Tensor):
            return None
        is_plain = type(item) is Tensor and item.layout is torch.strided
        if not is_plain or item.is_nested or (_is_large(item, sides[0]) and not all_travel):
            shape = () if item.is_nested else tuple(item.shape)
            return shape, item.dtype, item.device.type
        if id(item) not in known:
            known[id(item)] = len(known)
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


def _load(data: bytes, sides: Sequence[Tensor], origin: Origin) -> Any:
    def tensor_of(name: Any) -> Tensor:
        if len(name) == 3:
            shape, dtype, device = name
            return Unknown.of(shape, dtype, torch.device(device), origin)
        index, kind = name
        tensor: Tensor = sides[index].to(kind)
        return tensor

    unpickler = pickle.Unpickler(io.BytesIO(data))
    unpickler.persistent_load = tensor_of  # type: ignore[method-assign]
    return unpickler.load()


_NOTHING = object()
_DEPTH = 3


class _Seen:
    """A value at one time, and its contents if it is a list or a dict."""

    def __init__(self, value: Any = _NOTHING, depth: int = _DEPTH) -> None:
        self.value = value
        self._depth = depth
        self._items: list[_Seen] = []
        self._named: dict[Any, _Seen] = {}
        if type(value) is list and depth:
            self._items = [_Seen(item, depth - 1) for item in value]
        elif type(value) is dict and depth:
            self._named = {name: _Seen(item, depth - 1) for name, item in value.items()}

    def change_to(self, value: Any) -> tuple[str, Any] | None:
        """Return how the value has changed, None if it hasn't."""
        if value is not self.value:
            return "put", value
        if type(value) is list and self._depth:
            count = len(self._items)
            if len(value) < count or any(map(_Seen.change_to, self._items, value)):
                return "replace", value
            return ("append", value[count:]) if len(value) > count else None
        if type(value) is dict and self._depth:
            changes = {name: self._at(name).change_to(item) for name, item in value.items()}
            changes = {name: change for name, change in changes.items() if change is not None}
            return ("change", changes) if changes else None
        return None

    def apply(self, change: tuple[str, Any], names: Any, name: Any) -> None:
        """Apply to `names[name]`, which held this value, a change from another stage."""
        kind, value = change
        if kind == "put":
            names[name] = value
        elif kind == "append":
            # Skipping the layer may have added stand-ins for the same items.
            names[name][len(self._items) :] = value
        elif kind == "replace":
            names[name][:] = value
        else:
            for inner, inner_change in value.items():
                self._at(inner).apply(inner_change, names[name], inner)

    def undo(self) -> None:
        """Restore the contents of a list or a dict."""
        inside = (*self._items, *self._named.values())
        if type(self.value) is list and self._depth:
            self.value[:] = [item.value for item in self._items]
        elif type(self.value) is dict and self._depth:
            self.value.clear()
            self.value.update({name: item.value for name, item in self._named.items()})
        for item in inside:
            item.undo()

    def _at(self, name: Any) -> "_Seen":
        return self._named.get(name) or _Seen()
