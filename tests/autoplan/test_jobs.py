"""What has to be planned after the loss of ranks is solved before, and nobody searches again."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lightning_hetero.autoplan.facts import AutoPlan, AutoPlanned, BatchSizes, DataFacts, RunFacts
from lightning_hetero.autoplan.jobs import Contingencies, losses_to_plan_for
from lightning_hetero.autoplan.planning import PlanRequest, make_plan
from lightning_hetero.core.cluster import Cluster, Link, Node
from lightning_hetero.core.devices import KNOWN_DEVICES
from lightning_hetero.core.errors import ClusterError
from lightning_hetero.planner.contingency import PlanningTask, ProposalTask
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

    def plan(
        options: AutoPlan, left: Sequence[int], rank: int, known: Contingencies, **more: Any
    ) -> AutoPlanned:
        seats = [SEATS[number] for number in left]
        monkeypatch.setattr(RunFacts, "detect_seats", lambda _: tuple(seats))
        module = ToyModule(ToyOptions(num_layers=4))
        facts = RunFacts(
            module=module,
            layout=ModelLayout.of(module),
            comms=Communicators(global_rank=rank, world_size=len(seats)),
            device=torch.device("cpu"),
            sizes=lambda: BatchSizes(samples=2, sequence_length=8),
            num_batches=len(SEATS),
            first_ranks=tuple(left),
            **more,
        )
        return make_plan(options, facts, known)

    return plan


def test_the_first_of_those_who_are_left_plans_for_each_loss() -> None:
    found = {rank: set(losses_to_plan_for(SEATS, rank)) for rank in range(4)}
    assert found == {
        0: set(map(frozenset, ({1}, {2}, {3}, {2, 3}))),
        1: {frozenset({0})},
        2: {frozenset({0, 1})},
        3: set(),
    }
    assert list(losses_to_plan_for(SEATS[:1], 0)) == []


DESCRIBED = AutoPlan(
    cluster=Cluster(
        nodes=(Node(device="A100-80GB", count=3), Node(device="L4", count=1)),
        links=(Link(nodes=(0, 1), bytes_per_s=1e8),),
    )
)
DATA = DataFacts(lengths=np.array([8, 12, 40, 64] * 4), tokens_per_step=256)


def test_of_a_described_cluster_what_is_left_counts_but_it_knows_no_joiners() -> None:
    cluster = Cluster(
        nodes=tuple(Node(device=name, count=2) for name in ("A100-80GB", "T4", "L4")),
        links=(Link(nodes=(0, 2), bytes_per_s=1e9), Link(nodes=(1, 1), bytes_per_s=2e9)),
    )
    left = cluster.without({0, 2, 3})
    assert [(node.device, node.count) for node in left.nodes] == [("A100-80GB", 1), ("L4", 2)]
    assert left.links == (Link(nodes=(0, 1), bytes_per_s=1e9),)
    assert cluster.without(()) == cluster
    with pytest.raises(ClusterError, match="no nodes"):
        cluster.without(range(6))
    request = PlanRequest.of(DESCRIBED, num_stages=None, num_candidate_plans=1)
    assert request.for_survivors(3, (0, 2, 3)) == request
    with pytest.warns(UserWarning, match="doesn't name the devices of joiners"):
        assert request.for_survivors(3, None).plan == AutoPlan()


@pytest.mark.parametrize(
    ("options", "lost", "rank", "more"),
    [
        (DESCRIBED, {0, 1}, 2, {}),
        (AutoPlan(), {3}, 0, {"data": lambda: DATA}),
    ],
)
def test_the_plan_after_a_loss_is_there_before_it(
    make: Any,
    monkeypatch: pytest.MonkeyPatch,
    options: AutoPlan,
    lost: set[int],
    rank: int,
    more: dict[str, Any],
) -> None:
    known = Contingencies()
    before = make(options, range(4), rank, known, **more)
    assert before.foreseen
    left = [number for number in range(4) if number not in lost]
    expected = make(options, left, 0, Contingencies(), **more)
    known.prepare(before.foreseen)
    deadline_s = time.monotonic() + 120.0

    def is_solved(task: object) -> bool:
        return any(solved == task for solved, _ in list(known._answers))

    while not all(map(is_solved, before.foreseen)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    for kind in (PlanningTask, ProposalTask):
        monkeypatch.setattr(kind, "solve", lambda _: pytest.fail("a search is awaited"))
    after = make(options, left, 0, known, **more)
    assert after.plan == expected.plan
    assert after.lower_bound_s == expected.lower_bound_s
    known.prepare(after.foreseen)  # Another generation, whose process may end at any time.
    known.stop()
