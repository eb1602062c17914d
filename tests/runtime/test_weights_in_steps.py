"""Steps that compute with parameters themselves train as on one device, or are refused by name."""

import pytest

from tests.processes import ProcessPool
from tests.runtime.weight_runs import COPIES, WeightCase, penalise

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
