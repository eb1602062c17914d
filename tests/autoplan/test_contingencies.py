"""What has to be planned after the loss of ranks is solved before, and nobody searches again."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lightning_hetero.autoplan.contingencies import Contingencies, losses_to_plan_for
from lightning_hetero.autoplan.data_facts import BatchSizes
from lightning_hetero.autoplan.facts import AutoPlan, AutoPlanned, RunFacts
from lightning_hetero.autoplan.planning import make_plan
from lightning_hetero.core.devices import KNOWN_DEVICES
from lightning_hetero.planner.contingency import PlanningTask
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.setup.detect import Seat
from lightning_hetero.runtime.setup.layout import ModelLayout
from tests.toy import ToyModule, ToyOptions

SEATS = tuple(
    Seat(host=host, device=KNOWN_DEVICES[name], base=name, is_cpu=False)
    for host, name in (("a", "A100-80GB"), ("a", "A100-80GB"), ("b", "T4"), ("b", "V100-16GB"))
)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what plans for some seats, as one of their ranks."""
    monkeypatch.setattr(Communicators, "on_rank_0", lambda _, work: work())

    def plan(seats: Sequence[Seat], rank: int, known: Contingencies) -> AutoPlanned:
        monkeypatch.setattr(RunFacts, "detect_seats", lambda _: tuple(seats))
        module = ToyModule(ToyOptions(num_layers=4))
        facts = RunFacts(
            module=module,
            layout=ModelLayout.of(module),
            comms=Communicators(global_rank=rank, world_size=len(seats)),
            device=torch.device("cpu"),
            sizes=lambda: BatchSizes(samples=2, sequence_length=8),
            num_batches=len(SEATS),
        )
        return make_plan(AutoPlan(), facts, known)

    return plan


def test_the_first_of_those_who_are_left_plans_for_each_loss() -> None:
    found = {rank: set(losses_to_plan_for(SEATS, rank)) for rank in range(4)}
    assert found == {
        0: {frozenset({1}), frozenset({2}), frozenset({3}), frozenset({2, 3})},
        1: {frozenset({0})},
        2: {frozenset({0, 1})},
        3: set(),
    }
    assert list(losses_to_plan_for(SEATS[:1], 0)) == []


@pytest.mark.parametrize(("lost", "rank"), [({3}, 0), ({0, 1}, 2)])
def test_the_plan_after_a_loss_is_there_before_it(
    make: Any, monkeypatch: pytest.MonkeyPatch, lost: set[int], rank: int
) -> None:
    known = Contingencies()
    before = make(SEATS, rank, known)
    assert before.foreseen
    left = [seat for number, seat in enumerate(SEATS) if number not in lost]
    expected = make(left, 0, Contingencies())
    known.prepare(before.foreseen)
    deadline_s = time.monotonic() + 120.0
    while not all(map(known.knows, before.foreseen)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    monkeypatch.setattr(PlanningTask, "solve", lambda _: pytest.fail("a search is awaited"))
    after = make(left, 0, known)
    assert after.plan == expected.plan
    assert after.lower_bound_s == expected.lower_bound_s
    known.prepare(after.foreseen)  # Another generation, whose process may end at any time.
    known.stop()
