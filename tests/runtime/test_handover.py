"""What stages hand on: hidden states of any shape and dtype, trained as one device does."""

from typing import Any

import pytest

from tests.processes import ProcessPool
from tests.runtime.handover_runs import train_shapes
from tests.runtime.runs import pipeline, plan_of, stage

pytestmark = pytest.mark.dist

TWO = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 3)))
THREE = plan_of(pipeline(stage(1, 0, 1), stage(0, 1, 2), stage(2, 2, 3)))


@pytest.mark.parametrize(("plan", "world_size"), [(TWO, 2), (THREE, 3)])
def test_layers_may_change_shape_and_dtype_of_the_hidden_state(
    pool: ProcessPool, plan: dict[str, Any], world_size: int
) -> None:
    kinds = ["pool", "dtype"]
    (expected,) = pool.run(train_shapes, 1, kinds, None)
    for found in pool.run(train_shapes, world_size, kinds, plan):
        for kind in kinds:
            tolerance = 1e-2 if kind == "dtype" else 1e-5
            assert found[kind] == pytest.approx(expected[kind], rel=tolerance), kind
