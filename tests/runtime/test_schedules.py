"""Whatever order passes run in, gradients are those of 1F1B, bit for bit."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lightning_hetero import HeteroStrategy
from lightning_hetero.core.errors import ConfigurationError
from tests.processes import ProcessPool
from tests.runtime.runs import Case, Outcome, pipeline, plan_of, stage, train
from tests.runtime.schedule_runs import train_ordered
from tests.runtime.test_parity import assert_same_training

pytestmark = pytest.mark.dist

_options = {
    "deadline": None,
    "phases": [Phase.explicit, Phase.reuse, Phase.generate],
    "suppress_health_check": list(HealthCheck),
}


def assert_equal(found: Outcome, expected: Outcome) -> None:
    assert found.losses == expected.losses
    assert found.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        np.testing.assert_array_equal(found.weights[name], value, err_msg=name)


def check(pool: ProcessPool, case: Case, schedule: str) -> list[tuple[Outcome, set[str], int]]:
    expected = pool.run(train, case.world_size, case)
    found = pool.run(train_ordered, case.world_size, case, schedule)
    for (outcome, _, _), usual in zip(found, expected, strict=True):
        assert_equal(outcome, usual)
    return found


def three_stages(**more: Any) -> dict[str, Any]:
    stages = stage(0, 0, 1) | more, stage(1, 1, 2), stage(2, 2, 4) | more
    return plan_of(pipeline(*stages, num_microbatches=5))


@pytest.mark.parametrize("tied", [False, True])
def test_split_backwards_change_no_bit(pool: ProcessPool, *, tied: bool) -> None:
    case = Case(plan=three_stages(), world_size=3, num_layers=4, tied=tied, batch_size=5)
    found = check(pool, case, "split")
    assert all({"F", "I", "W"} <= kinds for _, kinds, _ in found)
    usual = pool.run(train, 3, case)
    for (_, _, peak), outcome in zip(found, usual, strict=True):
        assert peak <= outcome.peak_in_flight, "split schedules hold no more than 1F1B"


def test_deep_schedules_hold_at_most_their_room_and_change_no_bit(pool: ProcessPool) -> None:
    plan = plan_of(pipeline(stage(0, 0, 2), stage(1, 2, 4), num_microbatches=8))
    case = Case(plan=plan, world_size=2, num_layers=4, batch_size=8, num_rows=32)
    found = check(pool, case, "deep")
    assert all("W" in kinds and peak <= 4 * 2 for _, kinds, peak in found)


V = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 2), stage(1, 2, 4), stage(0, 4, 5)))
LOOP = plan_of(pipeline(*(stage(i % 2, i, i + 1) for i in range(5)), num_microbatches=3))


@pytest.mark.parametrize("schedule", ["1f1b", "split", "deep"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("plan", [V, LOOP])
def test_ranks_may_run_several_stages(
    pool: ProcessPool, plan: dict[str, Any], schedule: str, *, tied: bool
) -> None:
    case = Case(plan=plan, world_size=2, num_layers=5, tied=tied, batch_size=6, num_rows=36)
    for outcome, _, _ in check(pool, case, schedule):
        assert_same_training(outcome, pool.run_alone(train, case.on_single_device()))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_split_backwards_change_no_bit_in_16_bit(pool: ProcessPool, precision: str) -> None:
    case = Case(plan=three_stages(), world_size=3, num_layers=4, batch_size=5, precision=precision)
    check(pool, case, "split")


@pytest.mark.parametrize("said", [{"recomputed_layers": 1}, {"selective_layers": 1}])
def test_recomputed_layers_are_split(pool: ProcessPool, said: dict[str, int]) -> None:
    case = Case(plan=three_stages(**said), world_size=3, num_layers=4, batch_size=5)
    check(pool, case, "split")


def test_adapters_beside_frozen_weights_are_split(pool: ProcessPool) -> None:
    case = Case(plan=three_stages(), world_size=3, num_layers=4, batch_size=5, model="adapted")
    check(pool, case, "split")


def test_sharded_layers_are_split(pool: ProcessPool) -> None:
    stages = stage([0, 1], 0, 2), stage(2, 2, 4)
    plan = plan_of(pipeline(*stages, num_microbatches=4))
    case = Case(plan=plan, world_size=3, num_layers=4, batch_size=4, model="packed")
    check(pool, case, "split")


def test_orders_for_micro_batches_of_their_own_sizes_change_no_bit(pool: ProcessPool) -> None:
    stages = stage(0, 0, 1), stage(1, 1, 2), stage(2, 2, 4)
    case = Case(
        plan=plan_of(pipeline(*stages, num_microbatches=5)),
        world_size=3,
        num_layers=4,
        batch_size=7,  # Cut into micro-batches of one and two rows.
        num_rows=35,
    )
    check(pool, case, "deep")


def test_compiled_layers_hide_what_is_split() -> None:
    with pytest.raises(ConfigurationError, match="compile_layers=False"):
        HeteroStrategy(schedule="split", compile_layers=True)


@settings(**_options, max_examples=8)
@given(data=st.data())
def test_random_plans_change_no_bit(pool: ProcessPool, data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(3, 5))
    ranks = data.draw(
        st.lists(st.integers(0, 1), min_size=2, max_size=num_layers).filter(lambda r: len({*r}) > 1)
    )
    inner = st.lists(
        st.integers(1, num_layers - 1),
        min_size=len(ranks) - 1,
        max_size=len(ranks) - 1,
        unique=True,
    )
    cuts = [0, *sorted(data.draw(inner)), num_layers]
    counts = [data.draw(st.integers(1, 6)) for _ in range(2)]
    stages = [stage(r, *ends) for r, ends in zip(ranks, pairwise(cuts), strict=True)]
    first = pipeline(*stages, num_microbatches=counts[0])
    second = pipeline(stage(2, 0, num_layers), num_microbatches=counts[1])
    case = Case(
        plan=plan_of(first, second),
        world_size=3,
        num_layers=num_layers,
        tied=data.draw(st.booleans()),
        batch_size=data.draw(st.integers(2, 6)),
        num_rows=48,
        accumulate=data.draw(st.integers(1, 2)),
        clip_val=data.draw(st.sampled_from([None, 0.1])),
        ownership=data.draw(st.sampled_from(["holders", "even", "parameter"])),
    )
    check(pool, case, data.draw(st.sampled_from(["split", "deep"])))
