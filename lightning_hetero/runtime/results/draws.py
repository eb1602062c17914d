"""Detect what a step draws from iterators and random generators that the module keeps.

One device draws once per batch. Under a plan the step draws once per micro-batch, on each rank that
runs this part of it, so it gets other items and numbers.
"""

import pickle
import random
import sys
import warnings
from collections.abc import Collection, Iterator
from functools import cache, partial
from io import IOBase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_hetero.runtime.callers import is_of_library

__all__ = ["DrawWatch", "warn_of_draws"]


_MOST_ITEMS = 100
"""Of a list or dict, or attributes of an object, in which iterators and generators are sought."""
_DEPTH = 2
"""How many lists, dicts and objects these may lie in, one inside another."""


class DrawWatch:
    """A context that watches each step of one iteration on one rank.

    While a step runs, the module's iterators are replaced by stand-ins that note draws.

    Args:
        module: The user's. Submodules of the user's own classes are looked at, too, and short
            lists, dicts and objects that these keep.
    """

    def __init__(self, module: nn.Module) -> None:
        self.from_iterators: set[str] = set()
        """Names of iterators from which steps have drawn."""
        self.from_generators: set[str] = set()
        """Names of random generators from which steps have drawn."""
        self.num_steps = 0
        """Steps that have begun."""
        self._module = module
        self._stand_ins: list[tuple[_Container, Any, _StandIn]] = []
        self._states: list[tuple[str, Any, bytes]] = []
        self._seen: set[int] = set()
        """Ids of the containers looked into: all layers keep the same configuration."""

    def __enter__(self) -> None:
        self.num_steps += 1
        for path, owner in self._module.named_modules():
            if not is_of_library(type(owner).__module__):
                start = f"{path}." if path else ""
                for name in [*vars(owner)]:
                    self._look_at(vars(owner), name, start + name, _DEPTH)

    def _look_at(self, container: "_Container", key: Any, name: str, depth: int) -> None:
        value = container[key]
        if _is_iterator(value):
            stand_in = _StandIn(value, partial(self.from_iterators.add, name))
            container[key] = stand_in
            self._stand_ins.append((container, key, stand_in))
        elif (state := _state_of(value)) is not None:
            self._states.append((name, value, state))
        elif depth:
            items, form = _items_of(value)
            if items and len(items) <= _MOST_ITEMS and id(items) not in self._seen:
                self._seen.add(id(items))
                for inner in [*items] if isinstance(items, dict) else range(len(items)):
                    self._look_at(items, inner, name + form.format(inner), depth - 1)

    def __exit__(self, *_: object) -> None:
        for container, key, stand_in in self._stand_ins:
            if _get(container, key) is stand_in:  # The step may have replaced it.
                container[key] = stand_in._iterator
        drawn = (name for name, value, state in self._states if _state_of(value) != state)
        self.from_generators.update(drawn)
        self._stand_ins, self._states = [], []
        self._seen.clear()


_Container = dict[Any, Any] | list[Any]


def _items_of(value: Any) -> tuple[_Container, str]:
    """Return what a list, a dict or an object of the user's holds, and how its items are named."""
    kind = type(value)
    if kind in (list, dict):
        return value, "[{!r}]"
    if isinstance(value, nn.Module | Tensor) or not _is_of_user(kind.__module__):
        return {}, ""
    return getattr(value, "__dict__", {}), ".{}"


@cache
def _is_of_user(module: str) -> bool:
    """Whether a Python module is neither Python's own nor installed: others' objects are let be."""
    file = getattr(sys.modules.get(module), "__file__", None)
    installed = {"site-packages", "dist-packages"}.intersection(Path(file or "").parts)
    root = module.partition(".")[0]
    is_foreign = root in sys.stdlib_module_names or is_of_library(module) or file is None
    return module == "__main__" or not (is_foreign or installed)


def _get(container: _Container, key: Any) -> Any:
    """Return what lies there; None if nothing does."""
    if isinstance(container, dict):
        return container.get(key)
    return container[key] if key < len(container) else None


class _StandIn:
    """Wraps an iterator, and calls `note` when it is asked for an item."""

    def __init__(self, iterator: Any, note: Any) -> None:
        vars(self).update(_iterator=iterator, _note=note)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._iterator)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._note()
        return next(self._iterator)

    def __len__(self) -> int:
        return len(self._iterator)

    def __bool__(self) -> bool:
        return bool(self._iterator)

    def __getattr__(self, name: str) -> Any:
        if name == "send":
            self._note()
        return getattr(self._iterator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._iterator, name, value)


def _is_iterator(value: object) -> bool:
    is_other = isinstance(value, nn.Module | Tensor | IOBase)
    return hasattr(type(value), "__next__") and not is_other


def _state_of(value: object) -> bytes | None:
    """Return the state of a random generator; None if the value is no generator."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return pickle.dumps(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return pickle.dumps(value.get_state(legacy=False))
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return pickle.dumps(value.getstate())
    return None


def warn_of_draws(names: Collection[str]) -> None:
    """Warn that what steps draw from these iterators and generators isn't what one device draws."""
    if names:
        warnings.warn(
            f"A step draws from {', '.join(sorted(names))} of the module. It does so in each "
            "micro-batch, on the ranks that run this part of it, where one device draws once a "
            "batch, so it isn't what one device gets. Draw in on_train_batch_start, which every "
            "rank calls once a batch, and let the step read what that has kept; of a second data "
            "loader, give the Trainer both in one CombinedLoader.",
            stacklevel=2,
        )
