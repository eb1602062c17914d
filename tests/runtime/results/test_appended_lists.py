"""What is looked at all at once is what would be found one by one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.results.appended_lists import AppendedLists


class Collector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items: list[Any] = [0]
        self.slots: list[Any] = [None, None]
        self.buckets: list[Any] = [[1], None]
        self.by_name: dict[str, Any] = {"known": [], "count": 1}
        self.number = 1
        self.total = torch.zeros(1)


def append_to_the_first_slot(module: Collector) -> None:
    module.slots[0] = [2]


def append_to_a_new_bucket(module: Collector) -> None:
    module.buckets[1] = [2]


APPENDS: dict[tuple[Any, ...], Callable[[Any], Any]] = {
    ("items",): lambda module: module.items.append(2),
    ("buckets", 0): lambda module: module.buckets[0].append(2),
    ("by_name", "known"): lambda module: module.by_name["known"].append(2),
    ("by_name", "new"): lambda module: module.by_name.update(new=[2]),
    ("new",): lambda module: setattr(module, "new", [2]),
    ("slots", 0): append_to_the_first_slot,
    ("buckets", 1): append_to_a_new_bucket,
}
COUNTS: dict[str, Callable[[Any], Any]] = {
    "number": lambda module: setattr(module, "number", 2),
    "total": lambda module: module.total.add_(1),
    "by_name['count']": lambda module: module.by_name.update(count=2),
}


@pytest.mark.parametrize("path", APPENDS)
@pytest.mark.parametrize("num_steps", [0, 1])
def test_items_are_found_wherever_a_step_appends_them(
    path: tuple[Any, ...], num_steps: int
) -> None:
    module = Collector()
    lists = AppendedLists(module)
    for _ in range(num_steps):  # Steps that append nothing.
        lists.begin()
        assert lists.take(after_layers=True) == {}
    lists.begin()
    APPENDS[path](module)
    assert lists.take(after_layers=True) == {path: [2]}
    lists.begin()
    assert lists.take(after_layers=True) == {}


@pytest.mark.parametrize("name", COUNTS)
def test_numbers_that_steps_change_are_found(name: str) -> None:
    module = Collector()
    lists = AppendedLists(module)
    for _ in range(2):
        lists.begin()
        assert lists.take(after_layers=True) == {}
    assert not lists.counted
    lists.begin()
    COUNTS[name](module)
    lists.take(after_layers=True)
    assert lists.counted == {name}


@pytest.mark.parametrize("path", APPENDS)
@pytest.mark.parametrize("is_last", [False, True])
def test_layers_may_append_nothing(path: tuple[Any, ...], *, is_last: bool) -> None:
    module = Collector()
    lists = AppendedLists(module)
    lists.begin()
    module.items.append(3)  # Before the layers the step may.
    lists.reach_layers()
    APPENDS[path](module)
    look = lists.leave_layers if is_last else partial(lists.take, after_layers=False)
    with pytest.raises(StepError, match="Something in the layers appends to"):
        look()


def test_numbers_of_parts_are_found_whatever_their_file_is_called() -> None:
    class Part(nn.Module):
        count = 0

    module, Part.__module__ = Collector(), "lightning_models.parts"
    module.part = part = Part()
    part.count = 1
    lists = AppendedLists(module, looks_at_parts=True)
    lists.begin()
    part.count = 2
    lists.take(after_layers=True)
    assert lists.counted == {"part.count"}


@pytest.mark.parametrize("name", ["mean", "best", "count"])
def test_numbers_of_plain_objects_are_found(name: str) -> None:
    class Balance:
        def __init__(self) -> None:
            self.mean, self.best, self.count = torch.zeros(()), torch.zeros(()), 0
            self.name = "a"

        def change(self, name: str) -> None:
            if name == "best":
                self.best.add_(1)
            else:
                setattr(self, name, getattr(self, name) + 1)

    module = Collector()
    module.balance = balance = Balance()
    for looks_at_parts in (False, True):
        lists = AppendedLists(module, looks_at_parts=looks_at_parts)
        for _ in range(2):
            lists.begin()
            lists.take(after_layers=True)
        assert not lists.counted
        lists.begin()
        balance.change(name)
        lists.take(after_layers=True)
        assert lists.counted == ({f"balance.{name}"} if looks_at_parts else set())
