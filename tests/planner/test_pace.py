"""Micro-batches are dealt so that the last pipeline ends as soon as it can."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.planner.pace import Pace, deal

seconds = st.floats(0.1, 5.0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=3), st.integers(1, 3), st.data())
def test_no_other_dealing_ends_sooner(kinds, copies, data):
    paces = [pace for pace in itertools.starmap(Pace, kinds) for _ in range(copies)][:4]
    total = data.draw(st.integers(len(paces), 9))
    found = deal(paces, [1] * len(paces), total)
    assert sum(found) == total
    every = (
        counts
        for counts in itertools.product(range(1, total + 1), repeat=len(paces))
        if sum(counts) == total
    )
    least_s = min(max(map(Pace.ends_s, paces, counts)) for counts in every)
    assert max(map(Pace.ends_s, paces, found)) == pytest.approx(least_s, rel=1e-9)


def test_samples_that_fill_no_micro_batch_are_not_dealt():
    paces = [Pace(1.0, 0.0), Pace(2.0, 0.0)]
    assert deal(paces, [4, 4], 18) is None
    assert deal(paces, [4, 2], 18) == [4, 1]


def test_exact_ends_of_few_micro_batches_count():
    late = Pace(1.0, 0.0, early_s=(1.0, 9.0, 9.0))
    assert deal([late, Pace(1.0, 0.0)], [1, 1], 5) == [1, 4]
    assert deal([Pace(1.0, 0.0), Pace(3.0, 0.0)], [1, 1], 5, equally=True) == [3, 2]
