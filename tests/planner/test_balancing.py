"""The layer split equals brute force on small pipelines, memory limits included."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.planner.balancing import balance_layers


@st.composite
def tables(draw):
    """Return times of up to 4 stages for up to 8 layers; too many layers may not fit."""
    num_layers = draw(st.integers(1, 8))
    stages = []
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            per_layer, fixed = draw(st.floats(0.1, 3.0)), draw(st.floats(0.0, 1.0))
            times = [fixed + per_layer * n for n in range(num_layers + 1)]
        else:
            times = draw(
                st.lists(st.floats(0.1, 9.0), min_size=num_layers + 1, max_size=num_layers + 1)
            )
        most = draw(st.integers(0, num_layers))
        stages.append(np.array([t if n <= most else np.inf for n, t in enumerate(times)]))
    return stages, num_layers


def splits(num_stages, num_layers):
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        edges = (0, *cuts, num_layers)
        yield tuple(b - a for a, b in itertools.pairwise(edges))


@settings(max_examples=400, deadline=None)
@given(tables())
def test_balancing_equals_brute_force_in_maximum_and_in_sum(case):
    stages, num_layers = case
    scores = {
        split: (
            max(times[n] for times, n in zip(stages, split, strict=True)),
            sum(times[n] for times, n in zip(stages, split, strict=True)),
        )
        for split in splits(len(stages), num_layers)
    }
    fitting = {split: score for split, score in scores.items() if np.isfinite(score[1])}
    found = balance_layers(stages, num_layers)
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert fitting[found] == pytest.approx(min(fitting.values()))


def test_a_device_of_twice_the_speed_gets_twice_the_layers():
    layers = np.arange(13, dtype=float)
    assert balance_layers([layers / 1.0, layers / 2.0], 12) == (4, 8)


def test_a_full_stage_hands_its_layers_on():
    layers = np.arange(13, dtype=float)
    small = np.where(layers <= 3, layers / 2.0, np.inf)
    assert balance_layers([layers / 1.0, small], 12) == (9, 3)
