"""Restore a module's forwards and hooks if a set-up fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_CALLS = ("forward", "_compiled_call_impl")


@contextmanager
def undone_if_it_fails(module: nn.Module) -> Iterator[None]:
    """Restore the forwards and hooks of a module and its submodules if this context raises.

    Parameters aren't restored: keeping the old ones meanwhile would take their memory twice.
    """
    before = [(item, _calls(item), _hooks(item)) for item in module.modules()]
    try:
        yield
    except BaseException:
        for item, calls, hooks in before:
            for name in _CALLS:
                item.__dict__.pop(name, None)
            item.__dict__.update(calls)
            for name, known in hooks.items():
                present = item.__dict__[name]
                present.clear()
                present.update(known)
        raise


def _calls(module: nn.Module) -> dict[str, Any]:
    return {name: module.__dict__[name] for name in _CALLS if name in module.__dict__}


def _hooks(module: nn.Module) -> dict[str, dict[Any, Any]]:
    return {
        name: dict(value)
        for name, value in module.__dict__.items()
        if "hooks" in name and isinstance(value, dict)
    }
