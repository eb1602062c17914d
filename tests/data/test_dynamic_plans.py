"""Plans that change from one iteration to the next train what a single device trains."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lightning_hetero.data.order import EpochOrder
from tests import fits
from tests.data.dynamic_runs import (
    LENGTHS,
    LONGER,
    SHORT,
    Ran,
    case_of,
    fit,
    fit_automatically,
)
from tests.fits import Outcome, assert_same
from tests.plans import pipeline, plan_of, stage
from tests.processes import ProcessPool

pytestmark = pytest.mark.dist

MIXED = [
    plan_of(pipeline(stage(0, 0, 3)), pipeline(stage([1, 2], 0, 3))),
    plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(1, 0, 1), stage(2, 1, 3))),
    plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(1, 0, 3)), pipeline(stage(2, 0, 3))),
    plan_of(pipeline(stage(2, 0, 1), stage(0, 1, 2), stage(1, 2, 3))),
]
TWO = [
    plan_of(pipeline(stage(1, 0, 2), stage(0, 2, 3))),
    plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(1, 0, 3))),
]

MEMORY_BYTES = 2_200_000
"""Of a device: less than half of what training takes where there is no limit, 4.8 MB."""


def assert_same_training(found: Ran, expected: Outcome) -> None:
    """Check all that was trained; a run that was resumed doesn't know what came before."""
    skipped = len(expected.losses) - len(found.outcome.losses)
    losses = expected.losses[:skipped] + found.outcome.losses
    # An epoch's mean begins anew with a run.
    logged = expected.logged if skipped else found.outcome.logged
    assert_same(replace(found.outcome, losses=losses, logged=logged), expected)


def test_a_plan_for_each_iteration_trains_as_one_device_does_and_resumes_on_other_ranks(
    pool: ProcessPool, tmp_path: Path
) -> None:
    """In mid-run all plans get their ranks in other places, and back."""
    path = str(tmp_path / "mid-epoch.ckpt")
    steps = len(EpochOrder(LENGTHS, tokens_per_step=60))
    single = pool.run(fit, 1, [], 1)[0].outcome
    ranks = pool.run(fit, 3, MIXED, 3, (steps // 2, path), None, (1, steps))
    assert all(found.outcome.losses == ranks[0].outcome.losses for found in ranks)
    assert len(ranks[0].outcome.losses) == 2 * steps
    assert all(found.plans == ranks[0].plans for found in ranks)
    start, stop = ranks[0].num_before
    assert all(outcome.num_before == [start, stop] for outcome in ranks)
    plans = ranks[0].plans
    assert all(plan in MIXED for plan in plans[:start] + plans[stop:])
    assert not any(plan in MIXED for plan in plans[start:stop])
    for part in (plans[start:stop], plans[stop:]):
        assert len({str(plan) for plan in part}) >= 2, "no plan was changed"
    assert max(outcome.longest_microbatch for outcome in ranks) > SHORT
    assert_same_training(ranks[0], single)
    # What was planned ahead of the last step is all that the store still has.
    assert ranks[0].num_left_in_store <= 2 * 3

    resumed = pool.run(fit, 2, TWO, 2, None, path)
    assert len(resumed[0].outcome.losses) == 2 * steps - steps // 2
    assert_same_training(resumed[0], single)


def test_a_stream_trains_under_plans_as_on_one_device(pool: ProcessPool) -> None:
    read = partial(fit, stream=True)
    single = pool.run(read, 1, [], 1)[0].outcome
    ranks = pool.run(read, 2, TWO, 2)
    assert all(found.outcome.losses == ranks[0].outcome.losses for found in ranks)
    assert len(ranks[0].outcome.losses) == len(single.losses) > 8
    assert_same_training(ranks[0], single)


@pytest.mark.slow
def test_plans_proposed_from_the_datas_lengths_train_within_memory_as_one_device_does(
    pool: ProcessPool, tmp_path: Path
) -> None:
    single = pool.run_alone(fits.fit, case_of(None, 1, times=LONGER))
    ranks = pool.run(fit_automatically, 2, (4.0, 1.0), MEMORY_BYTES, str(tmp_path))
    outcome, planned = ranks[0]
    assert planned.candidates is not None
    assert planned.plan == planned.candidates.plans[0]
    longest = LONGER * max(LENGTHS)
    assert f"{60 * LONGER} tokens an iteration in samples of up to {longest}" in planned.summary
    assert any(stage.activation_budget_bytes for _, _, stage in planned.plan.iter_stages())
    assert min(cost.kept_len for cost in planned.candidates.costs[0]) < longest
    assert all(other.candidates == planned.candidates for _, other in ranks)
    proposed = [plan.to_dict() for plan in planned.candidates.plans]
    assert all(plan in proposed for plan in outcome.plans)
    assert_same_training(outcome, single)
