"""Tell in a few calls whether any value in some dicts, such as modules' attributes, was replaced.

Hundreds of attributes are compared before and after each layer, and most never change.
"""

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any

__all__ = ["HeldValues"]

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
