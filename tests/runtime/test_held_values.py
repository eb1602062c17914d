from collections.abc import Callable
from typing import Any

import pytest

from lightning_hetero.runtime.held_values import HeldItems, HeldValues


def replace(place: dict[str, Any]) -> None:
    place["b"] = [0]


def add(place: dict[str, Any]) -> None:
    place["c"] = None


def remove(place: dict[str, Any]) -> None:
    del place["b"]


def rename(place: dict[str, Any]) -> None:
    place["c"] = place.pop("b")


def exchange(place: dict[str, Any]) -> None:
    place["a"], place["b"] = place["b"], place["a"]


def values_in(*places: dict[str, Any]) -> HeldValues:
    return HeldValues(place.values() for place in places)


def items_in(*places: dict[str, Any]) -> HeldItems:
    return HeldItems(places)


@pytest.mark.parametrize(
    ("hold", "change"),
    [
        *[(hold, change) for hold in (values_in, items_in) for change in (replace, add, remove)],
        *[(hold, exchange) for hold in (values_in, items_in)],
        (items_in, rename),
    ],
)
@pytest.mark.parametrize("is_last", [False, True])
def test_whatever_comes_goes_or_is_replaced_is_seen(
    hold: Callable[..., Any], change: Callable[[dict[str, Any]], None], *, is_last: bool
) -> None:
    changed: dict[str, Any] = {"a": 1, "b": [0]}
    other: dict[str, Any] = {"x": 1.0, "y": None}
    places = [other, changed] if is_last else [changed, other]
    held = hold(*places)
    assert held.are_same()
    assert held.are_same()  # It can be asked again.
    change(changed)
    assert not held.are_same()


@pytest.mark.parametrize("hold", [values_in, items_in])
def test_nothing_is_seen_inside_values(hold: Callable[..., Any]) -> None:
    place = {"a": [1]}
    held = hold(place)
    place["a"].append(2)
    assert held.are_same()


def test_values_at_names_that_are_left_out_are_not_compared() -> None:
    place = {"a": 1, "b": 2}
    held = HeldItems([place], without={"a"})
    place["a"] = 3
    assert held.are_same()
    place["c"] = 4
    assert not held.are_same()
