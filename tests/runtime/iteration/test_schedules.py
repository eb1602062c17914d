"""Whatever order passes run in, gradients are those of 1F1B, bit for bit."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lightning_hetero import HeteroStrategy
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.runtime.iteration import schedule_choice
from lightning_hetero.runtime.iteration.passes import StagePasses
from lightning_hetero.schedules import Schedule
from tests.fits import Case, Outcome, assert_same, assert_same_bits, fit
from tests.plans import pipeline, plan_of, stage
from tests.processes import ProcessPool

pytestmark = pytest.mark.dist


@dataclass(frozen=True)
class Ordered:
    """What a rank knows after runs of a case: by 1F1B, and by each schedule asked for."""

    usual: Outcome
    found: list[tuple[Outcome, set[str]]]
    """With the kinds of actions that ran."""


def train_each(rank: int, case: Case, schedules: tuple[str, ...]) -> Ordered:
    """Train by 1F1B, and under each schedule, however little it gains."""
    return Ordered(fit(rank, case), [_train_ordered(rank, case, item) for item in schedules])


def _train_ordered(rank: int, case: Case, schedule: str) -> tuple[Outcome, set[str]]:
    kinds: set[str] = set()
    original = StagePasses.run

    def noted(passes: StagePasses, actions: Any, step: Any, **more: Any) -> None:
        kinds.update(action.kind.value for action in actions.actions)
        original(passes, actions, step, **more)

    with (
        mock.patch.object(Schedule, "least_gain", -np.inf),
        mock.patch.object(schedule_choice, "_MEASURED_ITERATIONS", 2),
        mock.patch.object(schedule_choice, "_LONG_S", 0.0),
        mock.patch.object(StagePasses, "run", noted),
    ):
        case = replace(case, options={**case.options, "schedule": schedule})
        return fit(rank, case), kinds


def check(pool: ProcessPool, case: Case, *schedules: str) -> list[Ordered]:
    """Check that each schedule changes no bit of what 1F1B gives."""
    ranks = pool.run(train_each, case.size, case, schedules)
    for index in range(len(schedules)):
        assert_same_bits([item.found[index][0] for item in ranks], [item.usual for item in ranks])
    return ranks


def three_stages(**more: Any) -> dict[str, Any]:
    stages = stage(0, 0, 1) | more, stage(1, 1, 2), stage(2, 2, 4) | more
    return plan_of(pipeline(*stages, num_microbatches=5))


SHARDED = plan_of(pipeline(stage([0, 1], 0, 2), stage(2, 2, 4), num_microbatches=4))
SPLIT: dict[str, dict[str, Any]] = {
    "tied": {"tied": True},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "recomputed": {"plan": three_stages(recomputed_layers=1)},
    "selectively": {"plan": three_stages(selective_layers=1)},
    "adapters beside frozen weights": {"model": "adapted"},
    "sharded": {"plan": SHARDED, "batch_size": 4, "model": "packed"},
}


@pytest.mark.parametrize("name", SPLIT)
def test_split_backwards_change_no_bit(pool: ProcessPool, name: str) -> None:
    given = {"plan": three_stages(), "batch_size": 5, **SPLIT[name]}
    for item in check(pool, Case(world_size=3, num_layers=4, **given), "split"):
        ((outcome, kinds),) = item.found
        assert {"F", "I", "W"} <= kinds
        assert outcome.peak_in_flight <= item.usual.peak_in_flight, "no more than 1F1B holds"


def test_deep_schedules_hold_at_most_their_room_and_change_no_bit(pool: ProcessPool) -> None:
    plan = plan_of(pipeline(stage(0, 0, 2), stage(1, 2, 4), num_microbatches=8))
    case = Case(plan=plan, world_size=2, num_layers=4, batch_size=8, num_rows=32)
    for item in check(pool, case, "deep"):
        ((outcome, kinds),) = item.found
        assert "W" in kinds
        assert outcome.peak_in_flight <= 4 * 2
    # Micro-batches of one and two rows.
    check(pool, replace(case, plan=three_stages(), world_size=3, batch_size=7, num_rows=35), "deep")


V = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 2), stage(1, 2, 4), stage(0, 4, 5)))
LOOP = plan_of(pipeline(*(stage(i % 2, i, i + 1) for i in range(5)), num_microbatches=3))


@pytest.mark.parametrize(("plan", "tied"), [(V, True), (LOOP, False)])
def test_ranks_may_run_several_stages(
    pool: ProcessPool, plan: dict[str, Any], *, tied: bool
) -> None:
    case = Case(plan=plan, world_size=2, num_layers=5, tied=tied, batch_size=6, num_rows=18)
    alone = pool.run_alone(fit, case.on_single_device())
    for item in check(pool, case, "split", "deep"):
        assert_same(item.usual, alone)


def test_compiled_layers_hide_what_is_split() -> None:
    with pytest.raises(ConfigurationError, match="compile_layers=False"):
        HeteroStrategy(schedule="split", compile_layers=True)


@settings(
    deadline=None,
    max_examples=4,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
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
        width=8,
        batch_size=(batch_size := data.draw(st.integers(2, 6))),
        num_rows=6 * batch_size,
        accumulate=data.draw(st.integers(1, 2)),
        clip_val=data.draw(st.sampled_from([None, 0.1])),
        ownership=data.draw(st.sampled_from(["holders", "even", "parameter"])),
    )
    check(pool, case, "split", "deep")
