"""With redundancy a plan trains the same, and every row is kept by two ranks, bit for bit alike."""

from typing import Any

import numpy as np
import pytest

from lightning_hetero import HeteroStrategy
from lightning_hetero.core.errors import ConfigurationError
from tests.processes import ProcessFailed, ProcessPool
from tests.runtime.redundancy_runs import (
    Disturb,
    Kept,
    RunsLater,
    change_a_standby,
    fit_refused,
    times_of_a_slow_push,
    train_redundant,
)
from tests.runtime.runs import Case, pipeline, plan_of, stage, train

pytestmark = pytest.mark.dist

TWO = plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(1, 0, 3)))
UNEQUAL = plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(2, 0, 1), stage(1, 1, 3)))
OTHER = plan_of(pipeline(stage(1, 0, 3)), pipeline(stage(0, 0, 2), stage(2, 2, 3)))
STAGES = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 3)))
SHARDED = plan_of(pipeline(stage([0, 1], 0, 4)), pipeline(stage(2, 0, 3), stage(3, 3, 4)))
THREE = plan_of(*(pipeline(stage(rank, 0, 3)) for rank in range(3)))
FOUR = plan_of(*(pipeline(stage(rank, 0, 3)) for rank in range(4)))
COLLECTIVES = (("exchange", "collectives"),)

CASES: dict[str, tuple[Case, str, Disturb | None]] = {
    "clipped, micro-batches in bf16": (
        Case(
            plan=TWO,
            world_size=2,
            num_microbatches=2,
            precision="bf16-mixed",
            clip_val=0.05,
            options=COLLECTIVES,
        ),
        "ab",
        None,
    ),
    # A ring of three: one rank keeps both ends of a parameter.
    "tied, accumulated, other plan": (
        Case(plan=UNEQUAL, world_size=3, tied=True, accumulate=2, clip_val=0.05, num_rows=32),
        "abc",
        RunsLater(OTHER),
    ),
    "frozen, standbys that hold nothing": (
        Case(plan=STAGES, world_size=2, model="adapted"),
        "aa",
        None,
    ),
    "tensor parallel, most on one node": (
        Case(plan=SHARDED, world_size=4, model="packed", num_layers=4, clip_val=0.05),
        "aaab",
        None,
    ),
    "whole matrices": (
        Case(plan=UNEQUAL, world_size=3, optimizer="muon", ownership="parameter"),
        "aab",
        None,
    ),
    "collectives": (
        Case(plan=FOUR, world_size=4, options=COLLECTIVES, num_rows=16, clip_val=0.05),
        "aabb",
        None,
    ),
    "collectives in a ring": (
        Case(plan=THREE, world_size=3, options=COLLECTIVES, num_rows=6),
        "abc",
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_copies_are_equal_bit_for_bit_and_train_as_one_device(pool: ProcessPool, name: str) -> None:
    case, nodes, disturb = CASES[name]
    expected = pool.run_alone(train, case.on_single_device())
    found: list[Kept] = pool.run(train_redundant, case.world_size, case, nodes, disturb)
    is_exact = case.precision == "32-true"
    for kept in found:
        np.testing.assert_allclose(kept.losses, expected.losses, rtol=1e-5 if is_exact else 2e-2)
    for weight, value in expected.weights.items() if is_exact else ():
        np.testing.assert_allclose(
            found[0].weights[weight], value, atol=1e-5 * np.abs(value).max(), err_msg=weight
        )
    owned = {rows: value for kept in found for rows, value in kept.owned.items()}
    assert sum(len(kept.owned) for kept in found) == len(owned), "a row has two owners"
    copies = {rows: value for kept in found for rows, value in kept.stood_by.items()}
    assert copies.keys() == owned.keys(), "a row has no standby"
    for rows, value in owned.items():
        np.testing.assert_array_equal(copies[rows], value, err_msg=str(rows))
    assert any(key != "weight" for _, key, _, _ in owned), "no state of the optimizer was compared"
    for rank, standby in enumerate(found[0].standbys):
        assert nodes[rank] != nodes[standby] or len(set(nodes)) == 1


@pytest.mark.parametrize("exchange", ["messages", "collectives"])
def test_nobody_steps_before_all_have_their_gradients(pool: ProcessPool, exchange: str) -> None:
    """Else a rank that is lost meanwhile leaves the others at different steps."""
    case = Case(plan=THREE, world_size=3, num_rows=18, options=(("exchange", exchange),))
    found = pool.run(times_of_a_slow_push, 3, case, "abc")
    pushed, stepped = (np.array(times) for times in zip(*found, strict=True))
    assert pushed.shape[1] > 1
    assert (stepped.min(axis=0) >= pushed.max(axis=0)).all()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(plan=UNEQUAL, world_size=3), id="messages"),
        # All weights are gathered, but not into what a standby keeps.
        pytest.param(
            Case(plan=THREE, world_size=3, options=COLLECTIVES, num_rows=18), id="collectives"
        ),
    ],
)
def test_a_changed_copy_is_found_and_named_on_every_rank(pool: ProcessPool, case: Case) -> None:
    with pytest.raises(ProcessFailed) as caught:
        pool.run(train_redundant, 3, case, "abc", change_a_standby)
    assert len(caught.value.failures) == 3
    for text in caught.value.failures.values():
        assert "StepError: After optimizer step 3" in text
        assert "of rank 0 on its standby 1" in text


@pytest.mark.parametrize(
    ("case", "memory_bytes", "redundancy", "told"),
    [
        (
            Case(plan=TWO, world_size=2, optimizer="norms"),
            (None, None),
            (1, 1),
            "Norms needs whole matrices: it steps the rows of a tensor otherwise",
        ),
        (
            Case(plan=TWO, world_size=2, optimizer="norms", ownership="parameter"),
            (None, None),
            (1, 1),
            "not refused",
        ),
        (
            Case(plan=TWO, world_size=2),
            (None, 150_000),
            (1, 1),
            "Rank 1 has 0.000126 GiB to use, but weights, gradients and states take",
        ),
        (Case(plan=TWO, world_size=2), (None, None), (0, 1), "Ranks don't run the same"),
    ],
)
def test_what_could_not_be_kept_twice_is_refused_on_every_rank(
    pool: ProcessPool,
    case: Case,
    memory_bytes: tuple[int | None, ...],
    redundancy: tuple[int, ...],
    told: str,
) -> None:
    for text in pool.run(fit_refused, 2, case, memory_bytes, redundancy):
        assert told in text


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two standbys": ({"redundancy": 2}, "redundancy is 2; it must be 0, or 1"),
    "sums of the backend": (
        {"redundancy": 1, "exchange": "reduce-scatter"},
        'Use exchange="collectives"',
    ),
    "a device there isn't": (
        {"owned_device": "disk"},
        "owned_device is 'disk'; it must be one of 'auto', 'device', 'cpu'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_cannot_be_had_are_refused(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(ConfigurationError, match=message):
        HeteroStrategy(**options)
