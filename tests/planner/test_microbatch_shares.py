"""Micro-batch shares equal brute force."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.planner.solvers.microbatch_shares import deal_microbatches, share_microbatches


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.0, 5.0), st.floats(0.1, 3.0), st.integers(1, 2)),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 9),
)
def test_shares_minimise_the_longest_pipeline(classes, total):
    flat = [(f, s) for f, s, n in classes for _ in range(n)]
    shares = share_microbatches(*zip(*classes, strict=True), total)
    best = min(
        (
            max(f + s * k for (f, s), k in zip(flat, counts, strict=True))
            for counts in itertools.product(range(1, total + 1), repeat=len(flat))
            if sum(counts) == total
        ),
        default=None,
    )
    if best is None:
        assert shares is None
        return
    counts = [count for share in shares for count in share]
    assert sum(counts) == total
    assert min(counts) >= 1
    longest = max(f + s * k for (f, s), k in zip(flat, counts, strict=True))
    assert longest == pytest.approx(best)


def test_equal_shares_differ_by_one_at_most():
    shares = deal_microbatches((2, 3), 12)
    assert sorted(count for share in shares for count in share) == [2, 2, 2, 3, 3]
    assert deal_microbatches((2, 3), 4) is None
