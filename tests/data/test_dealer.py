"""Laws of who names the plan of an iteration: the loaders' schedule or the batches themselves."""

from typing import Any

import pytest

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.data.dealer import Dealer, PlanSchedule
from lightning_hetero.models.batches import AssignedBatch

TWO, ONE = (
    ParallelPlan.even(world_size=2, num_layers=2, num_stages=num_stages) for num_stages in (1, 2)
)


class Assigning:
    deals_by_pipeline = True


def make_dealer() -> Dealer:
    return Dealer(TWO, global_rank=0, num_microbatches=1, num_batches=2, seed=lambda: 0)


def most(number: int) -> int:
    return number


def test_a_change_holds_from_the_first_iteration_that_was_not_dealt() -> None:
    dealer = make_dealer()
    batches: Any = iter(dealer.deal([1, 2, 3, 4, 5, 6], is_training=True, epoch=0))
    assert [next(batches), next(batches)] == [1, 3]
    assert dealer.plan_to_run(1, 0) is TWO
    assert dealer.change_plan(ONE, most_of_ranks=most) == 1
    assert dealer.plan_to_run(3, 1) is TWO
    assert next(batches) == 5
    assert dealer.plan_to_run(5, 2) is ONE
    assert dealer.plan_to_evaluate(0) is ONE


def test_batches_that_bring_their_plan_run_under_it_and_it_is_not_changed_elsewhere() -> None:
    dealer = make_dealer()
    dealer.deal(Assigning(), is_training=True, epoch=0)
    batch = AssignedBatch(plan=ONE, microbatches=(), first_index=0)
    assert dealer.plan_to_run(batch, 0) is ONE
    with pytest.raises(ConfigurationError, match="set_candidate_plans"):
        dealer.change_plan(TWO, most_of_ranks=most)


def test_a_thousand_changes_of_plan_in_one_pass_are_not_kept() -> None:
    schedule = PlanSchedule(TWO)
    for iteration in range(1000):
        plans = (TWO, ONE) if iteration % 2 == 0 else (ONE, TWO)
        schedule.plan_to_deal(iteration)
        assert schedule.plan_to_run(iteration) is plans[0]
        schedule.change(plans[1], from_iteration=iteration + 1)
    assert len(schedule._changes) == 2
