import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.assign.pipeline_cost import (
    CostTable,
    as_lengths,
    microbatch_times_s,
    sequence_times_s,
)
from lightning_hetero.core.errors import AssignmentError
from tests.assign.cases import cost, costs


def test_a_microbatch_costs_the_sum_of_its_sequences_and_c_once() -> None:
    pipeline = cost(a=1e-6, b=1e-3, c=0.5)
    times_s = microbatch_times_s(np.array([100, 200, 300]), ((0, 2), (1,)), pipeline)
    assert times_s == pytest.approx([0.01 + 0.1 + 0.09 + 0.3 + 0.5, 0.04 + 0.2 + 0.5])


@given(costs(), st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_all_ways_to_get_a_sequence_time_agree(pipeline, lengths) -> None:
    sizes = as_lengths(lengths)
    single = [pipeline.a * length**2 + pipeline.b * length for length in lengths]
    assert sequence_times_s(sizes, pipeline) == pytest.approx(single)
    assert CostTable.of([pipeline]).times_s(sizes)[:, 0] == pytest.approx(single)


def test_a_microbatch_above_kept_len_takes_longer_by_what_it_recomputes() -> None:
    pipeline = cost(a=0.0, b=1e-3, c=0.5, kept_len=200, recompute_share=0.4)
    times_s = microbatch_times_s(np.array([100, 200, 300]), ((0,), (1,), (0, 2)), pipeline)
    assert times_s == pytest.approx([0.1 + 0.5, 0.2 + 0.5, 0.4 * (1 + 0.4 * 0.5) + 0.5])
    table_s = CostTable.of([pipeline]).times_s(np.array([100, 200, 400]))[:, 0]
    assert table_s == pytest.approx([0.1, 0.2, 0.4 * (1 + 0.4 * 0.5)])


@given(costs(), st.lists(st.floats(0.1, 5), min_size=1, max_size=8))
def test_a_schedule_takes_at_most_eq_1_and_exactly_it_for_equal_microbatches(
    pipeline, work_s
) -> None:
    times_s = np.array(work_s) + pipeline.c
    eq_1_s = pipeline.latency_s(max(work_s), len(work_s))
    assert pipeline.schedule_s(times_s) <= eq_1_s * (1 + 1e-9)
    equal_s = np.full(len(work_s), max(work_s) + pipeline.c)
    assert pipeline.schedule_s(equal_s) == pytest.approx(eq_1_s)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"b": 0.0}, "b 0.0; it must be above 0"),
        ({"a": -1.0}, "a -1.0"),
        ({"max_len": 0}, "max_len 0"),
        ({"num_stages": 0}, "num_stages 0"),
    ],
)
def test_impossible_coefficients_are_refused(changes, words) -> None:
    with pytest.raises(AssignmentError, match=words):
        cost(**changes)


@pytest.mark.parametrize("lengths", [[3, 0], [[1, 2]], [1.5]])
def test_lengths_that_are_no_positive_integers_are_refused(lengths) -> None:
    with pytest.raises(AssignmentError):
        as_lengths(lengths)
