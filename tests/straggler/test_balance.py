"""Laws of `balance_microbatches`: exact, complete, in bounds."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.errors import PlanningError
from lightning_hetero.straggler.prediction import balance_microbatches

TIMES = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=4)


def brute_force(times_s, num_microbatches, fixed_s):
    counts = itertools.product(range(1, num_microbatches + 1), repeat=len(times_s))
    return min(
        max(f + m * t for f, m, t in zip(fixed_s, choice, times_s, strict=True))
        for choice in counts
        if sum(choice) == num_microbatches
    )


def makespan(times_s, counts, fixed_s):
    return max(f + m * t for f, m, t in zip(fixed_s, counts, times_s, strict=True))


@settings(max_examples=150, deadline=None)
@given(TIMES, st.integers(0, 7), st.data())
def test_equals_brute_force(times_s, extra, data):
    fixed_s = data.draw(st.lists(st.floats(0.0, 5.0), min_size=len(times_s), max_size=len(times_s)))
    num = len(times_s) + extra
    counts = balance_microbatches(times_s, num, fixed_s=fixed_s)
    assert sum(counts) == num
    assert min(counts) >= 1
    best = brute_force(times_s, num, fixed_s)
    assert makespan(times_s, counts, fixed_s) == pytest.approx(best, rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40), st.integers(0, 2000))
def test_no_single_move_helps(times_s, extra):
    counts = balance_microbatches(times_s, len(times_s) + extra)
    assert sum(counts) == len(times_s) + extra
    worst = max(m * t for m, t in zip(counts, times_s, strict=True))
    slowest = [i for i, (m, t) in enumerate(zip(counts, times_s, strict=True)) if m * t == worst]
    if counts[slowest[0]] > 1:
        others = (i for i in range(len(times_s)) if i not in slowest)
        assert all((counts[i] + 1) * times_s[i] >= worst * (1 - 1e-12) for i in others)


@given(st.integers(1, 6), st.integers(1, 5))
def test_equal_pipelines_get_equal_counts(num_pipelines, each):
    counts = balance_microbatches([0.5] * num_pipelines, num_pipelines * each)
    assert counts == (each,) * num_pipelines


def test_a_slow_pipeline_gives_micro_batches_away():
    assert balance_microbatches([1.9, 1.0, 1.0, 1.0], 32) == (5, 9, 9, 9)


def test_fewer_micro_batches_than_pipelines_are_refused():
    with pytest.raises(PlanningError):
        balance_microbatches([1.0, 1.0], 1)
