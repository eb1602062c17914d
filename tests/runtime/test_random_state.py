import random

import numpy as np
import torch

from lightning_hetero.runtime.random_state import PreservedRandomState, seed_of


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
