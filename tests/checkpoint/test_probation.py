"""A recovered state is trusted once its first steps are like what is known, else put aside."""

import math

import pytest

from lightning_hetero.checkpoint import CheckpointId, CheckpointWriter, Tier, TierKind, recover
from lightning_hetero.checkpoint.probation import (
    FailedTry,
    Probation,
    StepFacts,
    acquit,
    failed_alike,
    put_in_quarantine,
    read_failed_tries,
)
from lightning_hetero.checkpoint.pruning import prune
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.testing import MemoryStore
from tests.checkpoint.states import PLANS, assert_is_state, contents, needs_of

PLAN, SIZE = PLANS["one device"]
KNOWN = [StepFacts(step, 2.0, 1.0 + step % 3) for step in range(50, 101)]


def failed(step: int, loss: float, checkpoint: int = 100, place: str = "memory") -> FailedTry:
    facts = StepFacts(step, loss, 1.0)
    return FailedTry(CheckpointId(checkpoint), place, facts, "why", "batch 3 of epoch 0")


@pytest.mark.parametrize(
    ("loss", "norm", "is_doubted"),
    [
        (2.0, 3.0, False),
        (2.1, 29.0, False),
        (2.1, 31.0, True),
        (None, 31.0, True),
        # Layers that thaw have larger gradients at once, and predict as well as before.
        (2.0, 31.0, False),
        (math.nan, 1.0, True),
        (math.inf, None, True),
        (2.0, math.nan, True),
        (None, math.inf, True),
        (None, None, False),
        # Small gradients are no sign of anything.
        (2.0, 0.0, False),
    ],
)
def test_a_step_is_doubted_if_it_is_not_finite_or_its_gradients_leave_what_they_were(
    loss: float | None, norm: float | None, *, is_doubted: bool
) -> None:
    probation = Probation(100, KNOWN)
    assert bool(probation.doubt(StepFacts(101, loss, norm))) == is_doubted


def test_what_nothing_is_known_of_is_doubted_only_if_it_is_not_finite() -> None:
    assert Probation(0).doubt(StepFacts(1, 2.0, 1e9)) == ""
    assert Probation(0).doubt(StepFacts(1, math.nan, None)) != ""


def test_the_same_step_says_more_than_the_steps_before() -> None:
    spike = FailedTry(CheckpointId(100), "memory", StepFacts(103, 9.0, 500.0), "why", "")
    probation = Probation(90, KNOWN, [spike])
    assert probation.doubt(StepFacts(103, 9.1, 480.0)) == "", "another copy shows the same spike"
    assert probation.doubt(StepFacts(95, 9.1, 480.0)) != ""


def test_only_the_first_steps_and_those_that_failed_before_are_judged() -> None:
    probation = Probation(100, KNOWN, [failed(140, math.nan)])
    judged = [step for step in range(90, 200) if probation.covers(step)]
    assert judged == [*range(101, 109), 140]


def test_failures_are_alike_if_the_same_step_is_not_finite_from_different_copies() -> None:
    new = failed(103, math.nan, 80, "disk")
    before = [
        failed(103, math.nan),
        failed(103, math.nan),
        failed(103, math.inf, 100, "disk"),
        failed(104, math.nan, 60),
        failed(103, 2.0, 40),
    ]
    assert failed_alike(before, new) == [before[0], before[2], new]
    assert failed_alike(before, failed(103, 2.0)) == [failed(103, 2.0)]


@pytest.mark.parametrize("loss", [2.5, math.nan, math.inf])
def test_what_failed_reads_back_as_it_was(loss: float) -> None:
    item = failed(7, loss)
    assert repr(FailedTry.decode(item.encode())) == repr(item)
    with pytest.raises(CheckpointError, match="can't be read"):
        FailedTry.decode(item.encode()[:-3])


def test_what_is_put_aside_counts_as_nothing_until_it_is_acquitted() -> None:
    stores = {TierKind.MEMORY: MemoryStore(), TierKind.DISK: MemoryStore()}
    tiers = [Tier(kind=kind, store=store, keep=2) for kind, store in stores.items()]
    writer = CheckpointWriter(tiers)
    for step in (1, 2):
        writer.save(contents(step, PLAN, SIZE)[0]).wait_until_confirmed(20)
    writer.close()
    needs = needs_of(0, PLAN, SIZE)
    # The copy in memory, then the one on disk, then the older checkpoint; each once.
    for step, place in ((2, "memory"), (2, "disk"), (1, "memory")):
        found = recover(needs, tiers)
        assert_is_state(found, needs, step)
        assert found is not None
        assert found.report.place == place
        put_in_quarantine(tiers, failed(3, math.nan, step, place))
    # What can't be trusted replaces nothing.
    assert prune(Tier(kind=TierKind.DISK, store=stores[TierKind.DISK]), keep=1) == []
    put_in_quarantine(tiers, failed(3, math.nan, 1, "disk"))
    with pytest.raises(CheckpointError, match="put aside"):
        recover(needs, tiers)
    assert len(read_failed_tries(tiers, "")) == 4
    acquit(tiers, 4)
    with pytest.raises(CheckpointError, match="put aside"):
        recover(needs, tiers)
    acquit(tiers, 3)
    assert_is_state(recover(needs, tiers), needs, 2)
    assert len(read_failed_tries(tiers, "")) == 4, "what was tried stays on record"
