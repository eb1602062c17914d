"""Optimizers that need whole matrices get them, or are refused."""

from dataclasses import replace

import pytest

from tests.processes import ProcessFailed, ProcessPool
from tests.runtime.runs import Case, assert_same_training, pipeline, plan_of, stage, train

PLAN = plan_of(
    pipeline(stage(2, 0, 2), stage(0, 2, 3)),
    pipeline(stage(1, 0, 3)),
)
CASE = Case(plan=PLAN, world_size=3, optimizer="muon", batch_size=3, num_rows=24)


@pytest.mark.dist
def test_muon_with_whole_parameters_trains_as_a_single_device_does(pool: ProcessPool) -> None:
    case = replace(CASE, ownership="parameter")
    expected = pool.run_alone(train, case.on_single_device())
    for outcome in pool.run(train, 3, case):
        assert_same_training(outcome, expected)


@pytest.mark.dist
@pytest.mark.parametrize("ownership", ["auto", "even"])
def test_muon_on_slices_is_an_error_that_names_the_option(
    pool: ProcessPool, ownership: str
) -> None:
    case = replace(CASE, ownership=ownership)
    with pytest.raises(ProcessFailed, match=r'Muon needs whole matrices.*ownership="parameter"'):
        pool.run(train, 3, case)
