import random

import numpy as np
import pytest
import torch
from lightning import seed_everything

from lightning_hetero.runtime.random_state import (
    GlobalSeed,
    PreservedRandomState,
    RandomState,
    seed_of,
    seeds_of,
)


def test_seeds_drawn_together_differ_and_depend_on_every_part() -> None:
    seeds = [*seeds_of(4, 1, 2), *seeds_of(4, 2, 1), *seeds_of(4, 12)]
    assert len({*seeds, seed_of(), seed_of(1), seed_of(1, 2), seed_of(2, 1), seed_of(12)}) == 17
    assert all(0 <= seed < 2**63 for seed in seeds)
    # How many there are changes none of them: stages of other lengths draw alike.
    assert seeds_of(9, 1, 2)[:4] == seeds_of(4, 1, 2)


@pytest.mark.parametrize("has_seed", [True, False])
def test_a_run_that_begins_again_is_seeded_as_a_new_process_without_looking_at_the_stack(
    monkeypatch: pytest.MonkeyPatch, *, has_seed: bool
) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    with PreservedRandomState():
        seed_everything(11, verbose=False) if has_seed else torch.manual_seed(11)
        seed, seeds = torch.initial_seed(), GlobalSeed()
        draw_numbers()
        seeds.put_back(again=False)
        first = draw_numbers(), random.random(), float(torch.rand(()))
        monkeypatch.setattr(torch, "manual_seed", None)
        for _ in range(2):
            seeds.put_back(again=True)
            assert (draw_numbers(), random.random(), float(torch.rand(()))) == first
        assert torch.initial_seed() == seed
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)


@pytest.mark.parametrize("again", [True, False])
def test_a_process_that_begins_is_seeded_also_where_the_run_does_not(
    monkeypatch: pytest.MonkeyPatch, *, again: bool
) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "12")
    with PreservedRandomState():
        GlobalSeed().put_back(again=again)
        assert torch.initial_seed() == 12


def draw_numbers() -> list[float]:
    return [*np.random.standard_normal(3).tolist(), np.random.rand(), *np.random.randn(2).tolist()]


@pytest.mark.parametrize(("num_uniforms", "num_normals"), [(0, 0), (1, 1), (623, 2), (1247, 3)])
def test_numpys_generator_goes_on_as_if_nobody_had_looked(
    num_uniforms: int, num_normals: int
) -> None:
    def prepare() -> None:
        np.random.seed(5)
        np.random.rand(num_uniforms)
        np.random.standard_normal(num_normals)

    with PreservedRandomState():
        prepare()
        expected = draw_numbers()
        prepare()
        state = RandomState.now()
        assert draw_numbers() == expected
        for kept in (state, RandomState.from_dict(state.to_dict())):
            np.random.standard_normal(1)
            kept.put_back()
            assert draw_numbers() == expected
        prepare()
        with PreservedRandomState():
            np.random.standard_normal(7)
        assert draw_numbers() == expected
