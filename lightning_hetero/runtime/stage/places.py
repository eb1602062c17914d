"""Find out what has changed in the modules of a layer: attributes, buffers, lists and dicts."""

from collections.abc import Mapping
from itertools import repeat
from operator import is_
from typing import Any

from torch import nn

__all__ = ["Place", "Places"]

Place = tuple[str, str]
"""(path of a module inside the layer, kind of place)."""
_CONTAINERS = frozenset((list, dict))
_INTERNAL = frozenset(vars(nn.Module())) | {"forward"}
"""Attributes that torch itself reads: hooks, parameters and the like."""
_UNWATCHED = _INTERNAL - {"_buffers"}  # Which is a place of its own.


class Places:
    """All places where one layer may leave something, as they were at one time.

    A layer has two for each of its modules, with dozens of values, most of which never change. So
    all are compared at once, and looked at one by one only where any has changed.

    Args:
        places: By name.
    """

    def __init__(self, places: Mapping[Place, dict[str, Any]]) -> None:
        self.all = {name: _Seen(place) for name, place in places.items()}
        self.with_contents = {name: seen for name, seen in self.all.items() if seen.has_containers}
        """The places with lists or dicts, whose contents may change unnoticed."""
        self._places = [*places.values()]
        self._sizes = [*map(len, self._places)]
        held = [(place, name) for place in self._places for name in place if name not in _UNWATCHED]
        self._owners = [place for place, _ in held]
        self._names = [name for _, name in held]
        self._values = [place[name] for place, name in held]

    def are_same(self) -> bool:
        """Whether the same objects are still there."""
        values = map(dict.get, self._owners, self._names, repeat(_NOTHING))
        return [*map(len, self._places)] == self._sizes and all(map(is_, values, self._values))

    def undo(self) -> None:
        """Restore all places to what was found there."""
        for seen in self.all.values():
            seen.undo()


_NOTHING = object()
_DEPTH = 4


class _Seen:
    """A value at one time, and its contents if it is a list or a dict."""

    def __init__(self, value: Any = _NOTHING, depth: int = _DEPTH) -> None:
        self.value = value
        self._kind = type(value) if depth and type(value) in _CONTAINERS else None
        self._without = _INTERNAL if depth == _DEPTH else frozenset[str]()
        self._items: list[_Seen] = []
        self._named: dict[Any, _Seen] = {}
        if self._kind is list:
            self._items = [_Seen(item, depth - 1) for item in value]
        elif self._kind is dict:
            self._named = {name: _Seen(item, depth - 1) for name, item in self._watched()}

    @property
    def has_containers(self) -> bool:
        """Whether there are lists or dicts in it."""
        return any(item._kind is not None for item in (*self._items, *self._named.values()))

    def change_to(self, value: Any) -> tuple[str, Any] | None:
        """Return how the value has changed, None if it hasn't."""
        if value is not self.value:
            return "put", value
        if self._kind is list:
            count = len(self._items)
            if len(value) < count or any(map(_Seen.change_to, self._items, value)):
                return "replace", value
            return ("append", value[count:]) if len(value) > count else None
        if self._kind is dict:
            changes = {name: self._at(name).change_to(item) for name, item in self._watched()}
            changes = {name: change for name, change in changes.items() if change is not None}
            return ("change", changes) if changes else None
        return None

    def apply(self, change: tuple[str, Any]) -> None:
        """Apply a change from another stage to the list or dict that this was."""
        kind, given = change
        if kind == "append":
            self.value[len(self._items) :] = given
        elif kind == "replace":
            self.value[:] = given
        else:
            for name, inner in given.items():
                if inner[0] == "put":
                    self.value[name] = inner[1]
                else:
                    self._at(name).apply(inner)

    def undo(self) -> None:
        """Restore the contents of a list or a dict."""
        if self._kind is list:
            self.value[:] = [item.value for item in self._items]
        elif self._kind is dict:
            for name in [name for name, _ in self._watched() if name not in self._named]:
                del self.value[name]
            self.value.update({name: item.value for name, item in self._named.items()})
        for item in (*self._items, *self._named.values()):
            item.undo()

    def _watched(self) -> list[tuple[Any, Any]]:
        return [(name, item) for name, item in self.value.items() if name not in self._without]

    def _at(self, name: Any) -> "_Seen":
        return self._named.get(name) or _Seen()
