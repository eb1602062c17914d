"""Tell in a few calls whether any value in some dicts, such as modules' attributes, was replaced.

Dozens of attributes are compared before and after each layer, and most never change.
"""

from collections.abc import Collection, Iterable
from itertools import chain, repeat
from operator import is_
from typing import Any

__all__ = ["HeldItems", "HeldValues"]

_NOTHING = object()
"""Stands for the value at a name that is no longer there."""
_END = (object(),)
"""Follows all values, so that an added or removed value is noticed."""


class HeldValues:
    """The values in some places at one time, compared by identity.

    Args:
        places: Live views of the values, such as `dict.values()`.
    """

    def __init__(self, places: Iterable[Iterable[Any]]) -> None:
        self._places = (*places, _END)
        self._values = [*chain.from_iterable(self._places)]

    def are_same(self) -> bool:
        """Whether the same objects are still there."""
        return all(map(is_, chain.from_iterable(self._places), self._values))


class HeldItems:
    """The values at the names in some dicts at one time, compared by identity.

    Args:
        places: The dicts.
        without: Names whose values aren't compared. They may be replaced unnoticed, but not go.
    """

    def __init__(self, places: Iterable[dict[Any, Any]], *, without: Collection[Any] = ()) -> None:
        self._places = [*places]
        self._sizes = [*map(len, self._places)]
        held = [(place, name) for place in self._places for name in place if name not in without]
        self._owners = [place for place, _ in held]
        self._names = [name for _, name in held]
        self._values = [place[name] for place, name in held]

    def are_same(self) -> bool:
        """Whether the same objects are still there."""
        values = map(dict.get, self._owners, self._names, repeat(_NOTHING))
        return [*map(len, self._places)] == self._sizes and all(map(is_, values, self._values))
