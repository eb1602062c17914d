"""What stages hand on: hidden states of any shape and dtype, and losses that layers add."""

from typing import Any

import pytest

from tests.processes import ProcessPool
from tests.runtime.handover_runs import train_kinds
from tests.runtime.runs import pipeline, plan_of, stage

pytestmark = pytest.mark.dist

TWO = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 3)))
THREE = plan_of(pipeline(stage(1, 0, 1), stage(0, 1, 2), stage(2, 2, 3)))


def check(
    pool: ProcessPool, kinds: list[str], plan: dict[str, Any], world_size: int, batch_size: int
) -> None:
    (expected,) = pool.run(train_kinds, 1, kinds, None, batch_size)
    for found in pool.run(train_kinds, world_size, kinds, plan):
        for kind in kinds:
            tolerance = 1e-2 if kind == "dtype" else 1e-5
            assert found[kind] == pytest.approx(expected[kind], rel=tolerance), kind


@pytest.mark.parametrize(("plan", "world_size"), [(TWO, 2), (THREE, 3)])
def test_layers_may_change_shape_and_dtype_of_the_hidden_state(
    pool: ProcessPool, plan: dict[str, Any], world_size: int
) -> None:
    # How many tokens "ragged" keeps depends on the micro-batch, so the oracle sees the same ones.
    check(pool, ["pool", "width", "dtype", "ragged"], plan, world_size, 2)


@pytest.mark.parametrize(("plan", "world_size"), [(TWO, 2), (THREE, 3)])
def test_losses_that_layers_leave_or_return_train_in_stages(
    pool: ProcessPool, plan: dict[str, Any], world_size: int
) -> None:
    # They aren't means over samples, so the oracle sees the same micro-batches.
    check(pool, ["attribute", "list", "returned", "handed on"], plan, world_size, 2)


@pytest.mark.parametrize(("plan", "world_size"), [(TWO, 2), (THREE, 3)])
def test_routers_logits_of_all_layers_reach_the_loss(
    pool: ProcessPool, plan: dict[str, Any], world_size: int
) -> None:
    check(pool, ["mixtral", "qwen3_moe", "olmoe"], plan, world_size, 2)


def test_routers_logits_travel_between_groups_that_share_layers(pool: ProcessPool) -> None:
    shared = plan_of(pipeline(stage([0, 1], 0, 1), stage([2, 3], 1, 3)))
    check(pool, ["mixtral"], shared, 4, 2)
