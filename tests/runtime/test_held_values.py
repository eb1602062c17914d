from collections.abc import Callable
from typing import Any

import pytest

from lightning_hetero.runtime.held_values import HeldValues


def replace(place: dict[str, Any]) -> None:
    place["b"] = [0]


def add(place: dict[str, Any]) -> None:
    place["c"] = None


def remove(place: dict[str, Any]) -> None:
    del place["b"]


def exchange(place: dict[str, Any]) -> None:
    place["a"], place["b"] = place["b"], place["a"]


@pytest.mark.parametrize("change", [replace, add, remove, exchange])
@pytest.mark.parametrize("is_last", [False, True])
def test_whatever_comes_goes_or_is_replaced_is_seen(
    change: Callable[[dict[str, Any]], None], *, is_last: bool
) -> None:
    changed: dict[str, Any] = {"a": 1, "b": [0]}
    other: dict[str, Any] = {"x": 1.0, "y": None}
    places = [other, changed] if is_last else [changed, other]
    held = HeldValues(place.values() for place in places)
    assert held.are_same()
    assert held.are_same()  # It can be asked again.
    change(changed)
    assert not held.are_same()


def test_nothing_is_seen_inside_values() -> None:
    place = {"a": [1]}
    held = HeldValues([place.values()])
    place["a"].append(2)
    assert held.are_same()
