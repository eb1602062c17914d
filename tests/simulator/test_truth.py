"""Predictions against what was really measured; `bench_truth` says what rests on it."""

import pytest

from tests.benchmarks.bench_truth import measured_plans, roofline


@pytest.mark.parametrize("rows_of", [measured_plans, roofline])
def test_predicted_times_and_memory_are_near_the_measured_ones(rows_of):
    if not (rows := rows_of()):
        pytest.skip("no measurements beside the repository")
    assert [row.name for row in rows if not row.met] == []
