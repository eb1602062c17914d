"""See in a few calls whether any value in some dicts, such as modules' attributes, is another one.

Hundreds of attributes are looked at before and after each layer, and most never change.
"""

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any

__all__ = ["HeldValues"]

_END = (object(),)
"""Stands after all values, so that what comes or goes moves it."""


class HeldValues:
    """The values in some places at one time, compared by identity.

    Args:
        places: What shows them as they are whenever it is gone through, such as `dict.values()`.
    """

    def __init__(self, places: Iterable[Iterable[Any]]) -> None:
        self._places = (*places, _END)
        self._values = [*chain.from_iterable(self._places)]

    def are_same(self) -> bool:
        """Whether the very same values are there now."""
        return all(map(is_, chain.from_iterable(self._places), self._values))
