"""Lists of layers that are no chain: right in plans with one stage, refused in stages."""

import numpy as np
import pytest

from tests.processes import ProcessPool
from tests.runtime.free_runs import KINDS, refuse_free, train_free
from tests.runtime.runs import pipeline, plan_of, stage

pytestmark = pytest.mark.dist

DATA_PARALLEL = plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(1, 0, 3)))
TWO = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 3)))


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_plans_with_one_stage_train_what_is_no_chain(
    pool: ProcessPool, num_microbatches: int
) -> None:
    expected = pool.run(train_free, 1, KINDS, None)[0]
    for found in pool.run(train_free, 2, KINDS, DATA_PARALLEL, num_microbatches):
        for kind, (losses, weights) in expected.items():
            np.testing.assert_allclose(found[kind][0], losses, rtol=1e-5, err_msg=kind)
            for name, value in weights.items():
                np.testing.assert_allclose(
                    found[kind][1][name], value, rtol=1e-4, atol=1e-6, err_msg=f"{kind} {name}"
                )


@pytest.mark.parametrize("kind", ["reused", "chosen", "first dropped", "last dropped", "nested"])
def test_stages_refuse_what_is_no_chain(pool: ProcessPool, kind: str) -> None:
    for name, text, _ in pool.run(refuse_free, 2, kind, TWO):
        assert name in ("ModelError", "StepError", "PeerError")
        assert "a plan whose pipelines have one stage" in text
