"""Find the numbers that a user's code keeps outside its modules: in classes, files and closures.

`Model.calls += 1`, `global calls` and variables of closures may count micro-batches, as attributes
of modules do (see `appended_lists`).
"""

from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

from lightning_hetero.runtime.callers import is_of_library

__all__ = ["numbers_around"]

_MOST_ITEMS = 64
"""Items, at most, of a list or dict that is looked at."""


def numbers_around(parts: Iterable[object]) -> Iterator[tuple[str, int | float]]:
    """Yield the names and values of numbers that belong to the code of some objects.

    These are attributes of the objects' classes; and globals and closures of the classes' functions
    and of functions in the same file that those name. Lists and dicts yield their items.

    Args:
        parts: The objects, such as modules; those of libraries are passed over.
    """
    seen: set[object] = set()
    kinds = (kind for part in parts for kind in type(part).__mro__)
    for kind in dict.fromkeys(kinds):
        if is_of_library(kind.__module__) or kind.__module__ == "builtins":
            continue
        for name, value in vars(kind).items():
            if isinstance(value, FunctionType):
                yield from _around(value, seen)
            else:
                yield from _numbers_of(f"{kind.__name__}.{name}", value)


def _around(function: FunctionType, seen: set[object]) -> Iterator[tuple[str, int | float]]:
    if function in seen:
        return
    seen.add(function)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield from _numbers_of(f"{function.__qualname__}'s {name}", cell.cell_contents)
        except ValueError:
            continue  # The variable has no value yet.
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, FunctionType) and value.__globals__ is function.__globals__:
            yield from _around(value, seen)
        else:
            yield from _numbers_of(f"{function.__module__}.{name}", value)


def _numbers_of(name: str, value: Any) -> Iterator[tuple[str, int | float]]:
    """Yield a number, or the numbers in a list or dict."""
    if type(value) in (int, float):
        yield name, value
    elif type(value) in (list, dict) and len(value) <= _MOST_ITEMS:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((f"{name}[{key!r}]", n) for key, n in items if type(n) in (int, float))
