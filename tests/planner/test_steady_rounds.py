"""Many pipelines are timed at once as the simulator's propagation times each of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.planner.pace import finish_1f1b_s, steady_round_s
from lightning_hetero.simulator.propagate import EqualTimes, propagate

seconds = st.one_of(st.sampled_from([0.5, 1.0, 2.0]), st.floats(1e-3, 10.0))


def rows_of(draw, num: int, count: int) -> np.ndarray:
    rows = [[draw(seconds) for _ in range(count)] for _ in range(num)]
    return np.array(rows).reshape(num, count)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 6), st.one_of(st.integers(1, 12), st.just(2_000)))
def test_pipelines_end_as_propagated_however_many_micro_batches(data, num_stages, count):
    forward, backward, start = (rows_of(data.draw, 2, num_stages) for _ in range(3))
    there, back = (rows_of(data.draw, 2, num_stages - 1) for _ in range(2))
    round_s = steady_round_s(forward + backward, there, back)
    found = finish_1f1b_s((forward, backward), (there, back), start, count, round_s)
    for index in range(2):
        rows = (tuple(row[index]) for row in (forward, backward, there, back))
        expected = propagate(EqualTimes(*rows, count), list(start[index])).end_s
        # Rounds that are passed over at their average pace are exact to half a cycle.
        near = 1e-9 if count <= 12 else 1e-2
        assert found[index] == pytest.approx(expected, rel=near)
