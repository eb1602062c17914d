"""A step that draws from what the module keeps is warned of where micro-batches draw, too."""

import random
import sys
import warnings
from collections.abc import Callable, Generator
from itertools import count, islice
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetero.runtime.results.draws import DrawWatch, warn_of_draws
from tests.processes import ProcessPool
from tests.runtime.step_cases import PLANS, TinyModule, fit, same
from tests.toy import TokenRows


class Keeper(nn.Module):
    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.part = nn.Module()
        self.inner = nn.Identity()
        self.kept = kept


def numbers() -> Generator[int, Any, None]:
    yield from range(9)


ITERATORS: dict[str, Callable[[], Any]] = {
    "an iterator": lambda: iter([1, 2, 3]),
    "a generator": numbers,
    "a counter": lambda: count(1),
    "that of a loader": lambda: iter(DataLoader(TokenRows(4), batch_size=2)),
}


@pytest.mark.parametrize("name", ITERATORS)
def test_items_that_a_step_takes_are_noticed_and_are_what_they_were(name: str) -> None:
    kept = ITERATORS[name]()
    module = Keeper(kept)
    watch = DrawWatch(module)
    with watch:
        assert isinstance(module.kept, type(kept))
    assert not watch.from_iterators
    with watch:
        first = next(module.kept)
        rest = list(islice(module.kept, 1))
    assert (watch.from_iterators, watch.num_steps) == ({"kept"}, 2)
    assert module.kept is kept
    torch.testing.assert_close([first, *rest], [*islice(ITERATORS[name](), 2)])


def test_what_a_step_begins_anew_stays() -> None:
    module = Keeper(iter([]))
    with DrawWatch(module):
        if next(module.kept, None) is None:
            module.kept = iter([7])
    assert next(module.kept) == 7


def test_a_step_that_fails_leaves_iterators_where_they_were() -> None:
    kept = numbers()
    module = Keeper(kept)
    watch = DrawWatch(module)
    with pytest.raises(ZeroDivisionError), watch:
        module.kept.send(None) / 0
    assert module.kept is kept
    assert watch.from_iterators == {"kept"}


GENERATORS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "torch's": (torch.Generator(), lambda g: torch.rand(2, generator=g)),
    "numpy's": (np.random.default_rng(0), lambda g: g.uniform()),
    "numpy's older": (np.random.RandomState(0), lambda g: g.rand()),
    "Python's": (random.Random(0), lambda g: g.random()),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_random_numbers_that_a_step_draws_are_noticed(name: str) -> None:
    generator, draw = GENERATORS[name]
    watch = DrawWatch(Keeper(generator))
    with watch:
        torch.rand(2)
    assert not watch.from_generators
    with watch:
        draw(generator)
    assert watch.from_generators == {"kept"}


class Mixer:
    """Keeps what it draws from."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept


WHERE: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "kept[1]": (lambda kept: [0, kept], lambda held: held[1]),
    "kept['a']": (lambda kept: {"a": kept}, lambda held: held["a"]),
    "kept['a'][0]": (lambda kept: {"a": [kept]}, lambda held: held["a"][0]),
    "kept.kept": (Mixer, lambda held: held.kept),
    "kept.kept[0]": (lambda kept: Mixer([kept]), lambda held: held.kept[0]),
}


@pytest.mark.parametrize("where", WHERE)
def test_what_lies_in_lists_dicts_and_objects_is_noticed(where: str) -> None:
    put, get = WHERE[where]
    kept, generator = numbers(), np.random.default_rng(0)
    module, other = Keeper(put(kept)), Keeper(put(generator))
    watch, other_watch = DrawWatch(module), DrawWatch(other)
    with watch, other_watch:
        pass
    assert not watch.from_iterators | other_watch.from_generators
    with watch, other_watch:
        assert next(get(module.kept)) == 0
        get(other.kept).uniform()
    assert watch.from_iterators == {where} == other_watch.from_generators
    assert get(module.kept) is kept


def test_objects_of_installed_packages_are_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("package")
    package.__file__ = "/usr/lib/python3/site-packages/package.py"
    monkeypatch.setitem(sys.modules, "package", package)
    kind = type("Foreign", (Mixer,), {"__module__": "package"})
    inner = iter([1])
    module = Keeper(kind(inner))
    with DrawWatch(module):
        assert module.kept.kept is inner


def test_a_list_that_a_step_shortens_stays_as_it_leaves_it() -> None:
    module = Keeper([iter([1]), iter([2])])
    with DrawWatch(module):
        assert next(module.kept.pop()) == 2
    assert next(module.kept[0]) == 1
    assert type(module.kept[0]) is type(iter([]))


def test_what_is_kept_otherwise_is_let_be() -> None:
    long = [iter([1])] * 101
    circle: list[Any] = []
    circle.append(circle)
    plain = (nn.Linear(1, 1), torch.ones(2), random.SystemRandom(), open)
    for kept in ([1, 2], {"a": 1}, long, circle, *plain):
        watch = DrawWatch(Keeper(kept))
        with watch:
            pass
        assert not watch.from_iterators | watch.from_generators
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_draws(set())


class DrawsScales(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.scales = iter([0.5, 1.5, 0.7, 1.1, 0.3, 0.9, 1.3, 0.2] * 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scale = next(self.scales)
        return super().training_step(batch, batch_idx) * scale


class DrawsNoise(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.noise = np.random.default_rng(0)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels) + 0.1 * float(self.noise.uniform())


def warned(rank: int, make: Any, plan: Any, num_microbatches: int) -> tuple[dict[str, Any], bool]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fit(rank, make, plan, options={"num_microbatches": num_microbatches})
    return found, any("A step draws from" in str(item.message) for item in caught)


@pytest.mark.dist
def test_draws_of_micro_batches_are_warned_of(pool: ProcessPool) -> None:
    for plan in PLANS.values():
        assert all(told for _, told in pool.run(warned, 2, DrawsScales, plan, 2))
        assert any(told for _, told in pool.run(warned, 2, DrawsNoise, plan, 2))
    # Where each pipeline draws once the items are those of one device.
    alone, _ = pool.run_alone(warned, DrawsScales, None, 1)
    for found, told in pool.run(warned, 2, DrawsScales, PLANS["copies"], 1):
        same(found, alone)
        assert not told
