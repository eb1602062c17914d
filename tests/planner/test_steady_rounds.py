"""Many equal micro-batches follow each other at the pace of the slowest circle of stages."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.planner.columns import steady_round_s
from lightning_hetero.simulator.propagate import EqualTimes, propagate

seconds = st.one_of(st.sampled_from([0.5, 1.0, 2.0]), st.floats(1e-3, 10.0))


def row_of(draw, count: int) -> tuple[float, ...]:
    return tuple(draw(seconds) for _ in range(count))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 6), st.booleans())
def test_many_micro_batches_end_a_steady_round_apart(data, num_stages, blocking):
    forward, backward = (row_of(data.draw, num_stages) for _ in range(2))
    there, back = (row_of(data.draw, num_stages - 1) for _ in range(2))
    few, many = (
        max(
            propagate(
                EqualTimes(forward, backward, there, back, count),
                [0.0] * num_stages,
                blocking=blocking,
            ).end_s
        )
        for count in (2_000, 4_000)
    )
    times = EqualTimes(forward, backward, there, back, 1)
    assert (many - few) / 2_000 == pytest.approx(steady_round_s(times, blocking=blocking), rel=0.02)
