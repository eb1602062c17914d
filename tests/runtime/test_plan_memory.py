"""What changes of plan leave behind: nothing, however many there are."""

import pytest

from tests.processes import ProcessPool
from tests.runtime.plan_changes import PLANS, change_often, count_plans_at_once

pytestmark = pytest.mark.dist

MOST_GROWN_MB = 4.0
"""Between two looks a process differs by up to 1 MB without any leak."""


@pytest.mark.parametrize(("exchange", "rounds"), [("messages", 3), ("collectives", 1)])
def test_no_shard_or_gradient_outlives_its_plan(
    pool: ProcessPool, exchange: str, rounds: int
) -> None:
    for left in pool.run(change_often, 2, rounds * len(PLANS), 5, exchange):
        assert left.num_changes == rounds * len(PLANS)
        assert (left.most_alive, left.alive_behind) == (0, 0)


def test_a_plan_is_gone_before_an_iteration_makes_another_one_ready(pool: ProcessPool) -> None:
    for alive in pool.run(count_plans_at_once, 3):
        assert len(alive) > 1, "the first iteration shows where outer weights are used"
        assert not any(alive)


@pytest.mark.slow
def test_changes_of_plan_leave_memory_flat(pool: ProcessPool) -> None:
    """A leak is seen: a plan's weights are 0.3 MB of a process, 33 MB after 100 changes."""
    pool.run(change_often, 2, 100, 0)  # Until caches have what they need.
    for left in pool.run(change_often, 2, 100, 0, "messages", 5):
        assert left.most_alive == 0
        assert left.grown_mb <= MOST_GROWN_MB


@pytest.mark.slow
def test_weights_that_outlive_their_plan_are_seen_in_a_process_s_memory(pool: ProcessPool) -> None:
    for left in pool.run(change_often, 2, 50, 0, "messages", 10, True):
        assert left.grown_mb > 2 * MOST_GROWN_MB
