"""Append to lists of the module what one device's step would have appended.

Steps collect values for the end of an epoch: `self.outputs.append(...)`. They run to their end only
on last stages, once per micro-batch. The items that they append are removed, joined like what steps
return (see `outputs`), and appended on every rank, one item per batch.
"""

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.callers import is_of_library
from lightning_hetero.runtime.held_values import HeldValues
from lightning_hetero.runtime.results.outputs import Path, StepRecord, Unjoined, join
from lightning_hetero.runtime.results.surroundings import numbers_around

__all__ = ["AppendedLists", "extend_lists", "warn_of_numbers"]


_FIRST, _VERSION = itemgetter(slice(1)), attrgetter("_version")


@dataclass
class AppendedLists:
    """Items that steps append to lists of the module: attributes, or lists in them or in dicts."""

    module: nn.Module
    looks_at_parts: bool = False
    """Whether numbers of submodules, objects and code of the user's are looked at; takes longer."""
    _seen: "_Seen | None" = None
    """Snapshot by `begin` of all that is looked at; None if it may have changed."""
    _lengths: dict[Path, int] = field(default_factory=dict)
    _at_layers: dict[Path, int] | None = None
    """Growth of lists when the stage's first layer was reached; None before."""
    _numbers: dict[str, Any] = field(default_factory=dict)
    counted: set[str] = field(default_factory=set)
    """Numbers of the module that steps changed, or added to in place."""

    def begin(self) -> None:
        """Look at the lists before a step."""
        self._at_layers = None
        if self._seen is not None and self._seen.is_still():
            return
        names = self._names()
        lists = self._lists(names)
        self._lengths = {path: len(items) for path, items in lists.items()}
        self._numbers = dict(self._look_at_numbers(names))
        attributes = self.module.__dict__
        if not self.looks_at_parts:
            numbers = [attributes[name] for name in names.numbers]
            self._seen = _Seen(
                [attributes, *(attributes[name] for name in names.dicts)],
                [*lists.values()],
                [i for i in numbers if isinstance(i, Tensor) and not i.is_inference()],
            )

    def _names(self) -> "_Attributes":
        attributes = self.module.__dict__
        return _sorted_out(tuple(attributes), tuple(map(type, attributes.values())))

    def _look_at_numbers(self, names: "_Attributes") -> Iterator[tuple[str, Any]]:
        attributes = self.module.__dict__
        for name in names.dicts:
            items = attributes[name].items()
            yield from ((f"{name}[{key!r}]", n) for key, n in items if type(n) in (int, float))
        yield from _numbers_in((name, attributes[name]) for name in names.numbers)
        if self.looks_at_parts:
            yield from self._look_at_parts()

    def _look_at_parts(self) -> Iterator[tuple[str, Any]]:
        yield from numbers_around(self.module.modules())
        for path, part in self.module.named_modules():
            if is_of_library(type(part).__module__):
                continue
            start = f"{path}." if path else ""
            if path:
                items = vars(part).items()
                yield from ((start + key, n) for key, n in items if type(n) in (int, float))
            for name, owner in vars(part).items():
                if _is_plain_object(owner):
                    items = vars(owner).items()
                    yield from _numbers_in((f"{start}{name}.{key}", n) for key, n in items)

    def _changed(self, names: "_Attributes") -> Iterator[str]:
        for name, value in self._look_at_numbers(names):
            before = self._numbers.get(name, value)
            # A tensor that replaced another one is a cache, such as a mask, unless it is a number.
            counts = not isinstance(value, tuple) or value[0] == before[0] or value[2]
            if counts and value != before:
                yield name

    def reach_layers(self) -> None:
        """Look at the lists before the first layer of a stage."""
        self._at_layers = self.grown()

    def leave_layers(self) -> None:
        """Look at the lists after the model's last layer.

        Raises:
            StepError: Code in the layers appends to them, which other stages wouldn't see.
        """
        if self._at_layers is not None:
            self._check_layers(self._at_layers, self.grown())

    def _check_layers(self, before: Mapping[Path, int], grown: Mapping[Path, int]) -> None:
        if grown != before:
            names = sorted(str(path[0]) for path in grown)
            raise StepError(
                f"Something in the layers appends to {', '.join(names)} of the module, and other "
                "stages of the pipeline would never see it. Append after the layers, or use a "
                "plan whose pipelines have one stage."
            )

    def grown(self) -> dict[Path, int]:
        """Return how many items were appended to each list since `begin`; only lists with any."""
        if self._seen is not None and self._seen.is_still():
            return {}
        return self._growth(self._lists(self._names()))

    def _growth(self, lists: Mapping[Path, list[Any]]) -> dict[Path, int]:
        before, grown = self._lengths, dict[Path, int]()
        for path, items in lists.items():
            number = len(items) - before.get(path, 0)
            if number > 0:
                grown[path] = number
        return grown

    def take(self, *, after_layers: bool) -> dict[Path, list[Any]]:
        """Remove and return the items appended since `begin`.

        Args:
            after_layers: Whether the step ran on after the layers.

        Raises:
            StepError: See `leave_layers`.
        """
        taken = dict[Path, list[Any]]()
        if not self._at_layers and self._seen is not None and self._seen.is_still():
            return taken
        names = self._names()
        lists = self._lists(names)
        grown = self._growth(lists)
        if not after_layers and self._at_layers is not None:
            self._check_layers(self._at_layers, grown)
        self.counted.update(self._changed(names))
        self._seen = None  # It would keep objects alive that have been replaced.
        for path, number in grown.items():
            taken[path] = lists[path][-number:]
            del lists[path][-number:]
        return taken

    def _lists(self, names: "_Attributes") -> dict[Path, list[Any]]:
        found: dict[Path, list[Any]] = {}
        attributes = self.module.__dict__
        for name in names.lists:
            value = found[(name,)] = attributes[name]
            if value and type(value[0]) is list:
                inner = enumerate(value)
                found |= {(name, index): item for index, item in inner if type(item) is list}
        for name in names.dicts:
            items = attributes[name].items()
            found |= {(name, key): item for key, item in items if type(item) is list}
        return found


class _Seen(HeldValues):
    """A snapshot of a module's attributes, with those that may change in place.

    Args:
        attributes: Those of the module, and dicts among them.
        lists: All lists.
        tensors: Tensors with version counters.
    """

    def __init__(
        self,
        attributes: Sequence[dict[Any, Any]],
        lists: Sequence[list[Any]],
        tensors: Sequence[Tensor],
    ) -> None:
        self._lists, self._tensors = lists, tensors
        # A list's items may be lists, and the first one shows it.
        nested = [items for items in lists if items and type(items[0]) is list]
        super().__init__([*(item.values() for item in attributes), *nested])
        self._counts = [*map(len, lists), *map(_VERSION, tensors)]
        self._held = [*map(_FIRST, lists)]  # So that no other object gets its id.
        self._firsts = [id(item) for first in self._held for item in first]

    def is_still(self) -> bool:
        """Whether nothing has changed since."""
        # Lists as long as before have as many first items.
        return (
            [*map(len, self._lists), *map(_VERSION, self._tensors)] == self._counts
            and [*map(id, chain.from_iterable(map(_FIRST, self._lists)))] == self._firsts
            and self.are_same()
        )


def _numbers_in(items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the numbers among named values, and (id, version, is one number) of tensors."""
    for name, value in items:
        if not isinstance(value, Tensor):
            if type(value) in (int, float):
                yield name, value
        elif not value.is_inference():
            yield name, (id(value), value._version, value.numel() == 1)


def _is_plain_object(value: object) -> bool:
    """Whether a value is of a class of the user's, but no module or tensor."""
    kind = type(value)
    is_known = kind.__module__ == "builtins" or is_of_library(kind.__module__)
    return not is_known and not isinstance(value, nn.Module | Tensor) and hasattr(value, "__dict__")


class _Attributes(NamedTuple):
    """Names of a module's attributes that are looked at."""

    lists: tuple[str, ...]
    dicts: tuple[str, ...]
    numbers: tuple[str, ...]
    """Numbers, and tensors."""


@lru_cache(maxsize=64)
def _sorted_out(names: tuple[str, ...], kinds: tuple[type, ...]) -> _Attributes:
    """Sort names by the kinds of their values, which seldom change from step to step."""
    items = list(zip(names, kinds, strict=True))
    public = [(name, kind) for name, kind in items if name[0] != "_"]
    return _Attributes(
        lists=tuple(name for name, kind in items if kind is list),
        dicts=tuple(name for name, kind in public if issubclass(kind, dict)),
        numbers=tuple(
            name for name, kind in items if kind in (int, float) or issubclass(kind, Tensor)
        ),
    )


def warn_of_numbers(names: Collection[str]) -> None:
    """Warn that numbers which steps change on the module aren't those of one device."""
    if names:
        warnings.warn(
            f"A step changes {', '.join(sorted(names))} of the module or its code. It does so in "
            "each micro-batch, on the ranks that run this part of it, so what steps and hooks read "
            "there isn't what one device has. Take self.global_step or batch_idx to count steps; "
            "log it, return it, or append it to a list of the module.",
            stacklevel=2,
        )


def extend_lists(module: nn.Module, records: Sequence[StepRecord]) -> None:
    """Append what the step of the whole batch would have appended to the module's lists."""
    for path in dict.fromkeys(path for record in records for path in record.appended):
        columns = [record.appended.get(path, []) for record in records]
        sizes = [record.sizes for record in records]
        items = _list_at(module, path)
        if len({len(column) for column in columns}) > 1:
            items.append(Unjoined(columns))
        else:
            items += [join(parts, sizes) for parts in zip(*columns, strict=True)]


def _list_at(module: nn.Module, path: Path) -> list[Any]:
    found: Any = getattr(module, path[0])
    if len(path) > 1:
        found = found.setdefault(path[1], []) if isinstance(found, dict) else found[path[1]]
    items: list[Any] = found
    return items
