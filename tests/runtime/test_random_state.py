import random

import numpy as np
import pytest
import torch

from lightning_hetero.runtime import random_state
from lightning_hetero.runtime.random_state import PreservedRandomState, RandomState, seed_of


def test_seeds_depend_on_every_part_and_their_order() -> None:
    seeds = {seed_of(), seed_of(1), seed_of(1, 2), seed_of(2, 1), seed_of(12), seed_of(1, 2, 0)}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(1, 2) == seed_of(1, 2)


def test_generators_are_left_as_they_were_found() -> None:
    def draw() -> tuple[float, ...]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(4)
    expected = draw()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(4)
    with PreservedRandomState():
        draw()
    assert draw() == expected


def draw_numbers() -> list[float]:
    return [*np.random.standard_normal(3).tolist(), np.random.rand(), *np.random.randn(2).tolist()]


@pytest.mark.parametrize("is_memory_known", [True, False])
@pytest.mark.parametrize("num_normals", [0, 1, 2, 3])
@pytest.mark.parametrize("num_uniforms", [0, 1, 623, 1247])
def test_numpys_generator_goes_on_as_if_nobody_had_looked(
    monkeypatch: pytest.MonkeyPatch, num_uniforms: int, num_normals: int, *, is_memory_known: bool
) -> None:
    def prepare() -> None:
        np.random.seed(5)
        np.random.rand(num_uniforms)
        np.random.standard_normal(num_normals)

    assert random_state._is_memory_known()  # Else NumPy's own functions would be compared.
    monkeypatch.setattr(random_state, "_is_memory_known", lambda: is_memory_known)
    with PreservedRandomState():
        prepare()
        told, expected = np.random.get_state(), draw_numbers()
        prepare()
        state = RandomState.now()
        kind, keys, *rest = state.numpy
        assert kind == told[0]
        assert np.array_equal(keys, told[1])
        assert tuple(rest) == tuple(told[2:])
        assert draw_numbers() == expected
        for kept in (state, RandomState.from_dict(state.to_dict())):
            np.random.standard_normal(1)
            kept.put_back()
            assert draw_numbers() == expected
        prepare()
        with PreservedRandomState():
            np.random.standard_normal(7)
        assert draw_numbers() == expected
