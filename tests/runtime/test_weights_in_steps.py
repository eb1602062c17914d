"""Steps that compute with parameters themselves train as on one device, or are refused by name."""

import pytest

from tests.processes import ProcessPool
from tests.runtime.weight_runs import COPIES, SHARDED, TWO, WeightCase, functions_seen, penalise

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("penalty", ["before", "behind"])
def test_a_penalty_on_weights_counts_once_where_pipelines_have_one_stage(
    pool: ProcessPool, penalty: str
) -> None:
    (expected,) = pool.run(penalise, 1, WeightCase(penalty=penalty))
    for ownership in ("even", "holders"):
        case = WeightCase(penalty=penalty, plan=COPIES, ownership=ownership)
        for losses in pool.run(penalise, 2, case):
            assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("penalty", ["before", "behind", "layer"])
def test_weights_that_a_stage_does_not_hold_are_refused_by_name(
    pool: ProcessPool, penalty: str
) -> None:
    said = pool.run(penalise, 2, WeightCase(penalty=penalty, plan=TWO))
    assert all(isinstance(message, str) for message in said), said
    assert any("needs parameter model." in message for message in said), said


def test_weights_of_the_last_stage_may_be_used_in_the_step(pool: ProcessPool) -> None:
    (expected,) = pool.run(penalise, 1, WeightCase(penalty="layer", layer=2))
    for losses in pool.run(penalise, 2, WeightCase(penalty="layer", layer=2, plan=TWO)):
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("penalty", ["before", "behind", "layer"])
def test_weights_that_tensor_parallelism_has_cut_are_refused_by_name(
    pool: ProcessPool, penalty: str
) -> None:
    for message in pool.run(penalise, 2, WeightCase(penalty=penalty, plan=SHARDED)):
        assert isinstance(message, str), message
        assert "uses parameter model.blocks.0" in message
        assert "outside of its module" in message


def test_whoever_watches_a_step_does_not_see_its_weights_arrive(pool: ProcessPool) -> None:
    (expected,) = pool.run(functions_seen, 1, None)
    for seen in pool.run(functions_seen, 2, COPIES):
        # A flag and the size of the hidden state are read, and which storage it has.
        assert seen - {"is_inference", "numel", "untyped_storage"} <= expected
