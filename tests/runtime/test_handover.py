"""What stages hand on: hidden states of any shape and dtype, and losses that layers return."""

from typing import Any

import pytest

from tests.processes import ProcessPool
from tests.runtime.handover_runs import train_kinds
from tests.runtime.runs import pipeline, plan_of, stage

pytestmark = pytest.mark.dist

TWO = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 3)))
THREE = plan_of(pipeline(stage(1, 0, 1), stage(0, 1, 2), stage(2, 2, 3)))
SHARED = plan_of(pipeline(stage([0, 1], 0, 1), stage([2, 3], 1, 3)))


def check(pool: ProcessPool, kinds: list[str], *plans: tuple[dict[str, Any], int]) -> None:
    """Compare with one device that sees the same micro-batches: not all losses are means."""
    (expected,) = pool.run(train_kinds, 1, kinds, None, 2)
    for plan, world_size in plans:
        for found in pool.run(train_kinds, world_size, kinds, plan):
            for kind in kinds:
                tolerance = 1e-2 if kind == "dtype" else 1e-5
                assert found[kind] == pytest.approx(expected[kind], rel=tolerance), kind


def test_layers_may_change_shape_and_dtype_of_the_hidden_state(pool: ProcessPool) -> None:
    check(pool, ["pool", "width", "dtype", "ragged"], (TWO, 2), (THREE, 3))


def test_losses_that_layers_return_train_in_stages(pool: ProcessPool) -> None:
    check(pool, ["returned", "handed on"], (TWO, 2), (THREE, 3))


def test_routers_logits_of_all_layers_reach_the_loss(pool: ProcessPool) -> None:
    check(pool, ["mixtral"], (TWO, 2), (SHARED, 4))
    check(pool, ["qwen3_moe", "olmoe"], (THREE, 3))
