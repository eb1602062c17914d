"""Layers, micro-batches and the ends of pipelines equal brute force and the simulator's walk."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.planner.pace import Pace, balance_layers, deal, finish_1f1b_s, steady_round_s
from lightning_hetero.simulator.propagate import EqualTimes, propagate
from tests.planner.every_plan import splits

seconds = st.one_of(st.sampled_from([0.5, 1.0, 2.0]), st.floats(1e-3, 10.0))


@st.composite
def tables(draw):
    """Return rising times of up to 4 stages for up to 8 layers; too many may not fit.

    And whether no layer adds less than the one before it.
    """
    num_layers = draw(st.integers(1, 8))
    is_convex, stages = draw(st.booleans()), []
    for _ in range(draw(st.integers(1, 4))):
        steps = draw(st.lists(st.floats(0.1, 3.0), min_size=num_layers, max_size=num_layers))
        times = np.cumsum([0.0, *(sorted(steps) if is_convex else steps)])
        times[draw(st.integers(0, num_layers)) + 1 :] = np.inf
        stages.append(times)
    return stages, num_layers, is_convex


@settings(max_examples=200, deadline=None)
@given(tables())
def test_balancing_equals_brute_force_in_maximum_and_in_sum(case):
    stages, num_layers, is_convex = case
    scores = {}
    for split in splits(num_layers, len(stages)):
        times = [row[n] for row, n in zip(stages, split, strict=True)]
        if np.isfinite(times).all():
            scores[split] = max(times), sum(times)
    found = balance_layers(stages, num_layers)
    assert (found is None) == (not scores)
    if found:
        least = min(scores.values())
        assert scores[found][0] == pytest.approx(least[0])
        assert not is_convex or scores[found][1] == pytest.approx(least[1])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=3), st.integers(1, 3), st.data())
def test_no_other_dealing_of_micro_batches_ends_sooner(kinds, copies, data):
    paces = [pace for pace in itertools.starmap(Pace, kinds) for _ in range(copies)][:4]
    total = data.draw(st.integers(len(paces), 9))
    found = deal(paces, [1] * len(paces), total)
    assert sum(found) == total
    least_s = min(max(map(Pace.ends_s, paces, row)) for row in splits(total, len(paces)))
    assert max(map(Pace.ends_s, paces, found)) == pytest.approx(least_s, rel=1e-9)


def test_samples_are_dealt_by_exact_ends_and_not_if_they_fill_no_micro_batch():
    paces = [Pace(1.0, 0.0), Pace(2.0, 0.0)]
    assert deal(paces, [4, 4], 18) is None
    assert deal(paces, [4, 2], 18) == [4, 1]
    assert deal(paces, [1, 1], 5, equally=True) == [3, 2]
    # Exact ends of few micro-batches count before slope and fill.
    assert deal([Pace(1.0, 0.0, early_s=(1.0, 9.0, 9.0)), paces[0]], [1, 1], 5) == [1, 4]


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 6), st.one_of(st.integers(1, 12), st.just(2_000)))
def test_pipelines_timed_at_once_end_as_propagated_however_many_micro_batches(
    data, num_stages, count
):
    def rows(width: int) -> np.ndarray:
        return np.array([data.draw(seconds) for _ in range(2 * width)]).reshape(2, width)

    forward, backward, start = (rows(num_stages) for _ in range(3))
    there, back = (rows(num_stages - 1) for _ in range(2))
    round_s = steady_round_s(forward + backward, there, back)
    found = finish_1f1b_s((forward, backward), (there, back), start, count, round_s)
    for index in range(2):
        times = (tuple(row[index]) for row in (forward, backward, there, back))
        expected = propagate(EqualTimes(*times, count), list(start[index])).end_s
        # Rounds that are passed over at their average pace are exact to half a cycle.
        near = 1e-9 if count <= 12 else 1e-2
        assert found[index] == pytest.approx(expected, rel=near)
