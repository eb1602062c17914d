"""Ranks that are left go on from what they have, or say why they can't."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_hetero.checkpoint import Peers, Recovered, Source, assembly, live
from lightning_hetero.checkpoint.live import LiveState, recover_live
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.exchange.owners import find_standbys
from lightning_hetero.exchange.slices import Ownership
from tests.checkpoint.states import (
    PLANS,
    assert_is_state,
    contents,
    needs_of,
    run_ranks,
    specs,
    uneven_plan,
)

PLAN, STANDBYS = uneven_plan(), find_standbys("aabb")
Own = LiveState | str | None


def live_states(step: int, generation: int = 2) -> list[LiveState]:
    parts = contents(step, PLAN, 4, standbys=STANDBYS)
    return [LiveState(content=part, generation=generation) for part in parts]


def recover_all(
    states: list[Own], plan: ParallelPlan | None = None, *, tp: bool = True, **options: Any
) -> list[Recovered | str]:
    size = len(states)
    new = plan or ParallelPlan.even(world_size=size, num_layers=4)
    items = specs() if tp else [replace(item, tp_dim=None) for item in specs()]

    def action(rank: int, peers: Peers) -> Recovered | str:
        needs = needs_of(rank, new, size, items=items, **options)
        found = recover_live(needs, states[rank], peers)
        if isinstance(found, Recovered):
            assert_is_state(found, needs, 7)
        return found

    return run_ranks(size, action)


@pytest.mark.parametrize("tp", [True, False])
@pytest.mark.parametrize("lost", [{0}, {3}, {0, 1}, {2, 3}, {0, 3}])
def test_whoever_is_left_has_the_last_step_bit_for_bit(
    lost: set[int], monkeypatch: pytest.MonkeyPatch, *, tp: bool
) -> None:
    """Also where a later plan cuts along other dims, and what moves takes many requests."""
    monkeypatch.setattr(assembly, "CHUNK_BYTES", 100)
    states = live_states(7)
    left = [rank for rank in range(4) if rank not in lost]
    for new_rank, found in enumerate(recover_all([states[rank] for rank in left], tp=tp)):
        assert isinstance(found, Recovered)
        # Its own random numbers, and checkpoints from now on are newer than those of before.
        assert found.rank_metadata is not None
        assert found.rank_metadata["rank"] == left[new_rank]
        assert found.attempt == 1
        assert set(found.bytes_by_source) <= {Source.OWN_MEMORY, Source.PEER_MEMORY}


@pytest.mark.parametrize("name", PLANS)
def test_newcomers_get_theirs_from_the_others_under_any_plan(name: str) -> None:
    plan, size = PLANS[name]
    states: list[Own] = list(live_states(7)[: min(size, 4)])
    if size < 4:
        # All rows of two ranks that stand by for each other.
        two = ParallelPlan.even(world_size=2, num_layers=4)
        parts = contents(7, two, 2, standbys=(1, 0))
        states = [LiveState(content=p, generation=2) for p in parts][:size]
    states += [None] * (size - len(states))
    for rank, found in enumerate(recover_all(states, plan, ownership=Ownership.EVEN)):
        assert isinstance(found, Recovered)
        is_new = states[rank] is None
        assert (found.rank_metadata is None) == is_new
        assert not is_new or set(found.bytes_by_source) <= {Source.PEER_MEMORY}


def test_what_a_rank_keeps_itself_does_not_travel() -> None:
    # Of two ranks that stand by for each other either has all.
    plan = ParallelPlan.even(world_size=2, num_layers=4)
    parts = contents(7, plan, 2, standbys=(1, 0))
    states = [LiveState(content=part, generation=0) for part in parts]
    (found,) = recover_all([states[1]])
    assert isinstance(found, Recovered)
    assert set(found.bytes_by_source) == {Source.OWN_MEMORY}
    both = recover_all([*states, None], ownership=Ownership.EVEN)
    for rank, item in enumerate(both):
        assert isinstance(item, Recovered)
        source = Source.PEER_MEMORY if rank == 2 else Source.OWN_MEMORY
        assert set(item.bytes_by_source) == {source}


def test_ranks_that_do_not_go_together_say_why_alike() -> None:
    states = live_states(7)
    behind, older = live_states(6)[1], live_states(7, generation=1)[1]
    torn = "it was lost in the middle of an optimizer's step"
    for own, told in (
        ([states[0], behind, states[3]], "different steps (rank 0 to 7, rank 1 to 6"),
        ([states[0], older, states[3]], "different steps"),
        ([states[0], torn, states[3]], "rank 1 has nothing of the last step: it was lost in the"),
        ([states[1], states[3]], "of the generation before"),
        ([states[0], states[2]], "without ranks [1, 3] of the generation before: "),
        ([states[0], states[2], None], "No part has rows"),
        ([None, *states], "rank 0 has trained no step"),
    ):
        found = recover_all(list(own))
        assert len(set(found)) == 1
        assert isinstance(found[0], str)
        assert told in found[0]


@pytest.mark.parametrize("value", [lambda: None, object()])
def test_state_that_cannot_be_told_is_no_reason_to_end(value: Any) -> None:
    states = live_states(7)
    bad = replace(states[0], content=replace(states[0].content, metadata={"x": value}))
    found = recover_all([bad, states[1], states[2], states[3]])
    assert len(set(found)) == 1
    assert isinstance(found[0], str)
    assert "Error" in found[0]


@pytest.mark.parametrize("what", ["gives", "takes"])
def test_rows_that_a_rank_cannot_give_or_take_end_nobody(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Whatever fails on one of them, no other one waits for rows that never come."""
    states = live_states(7)

    def fails(*_: Any) -> Any:
        raise CheckpointError("none left")

    place = live._LiveFiles if what == "gives" else assembly.Assembly
    monkeypatch.setattr(place, "read" if what == "gives" else "finish", fails)
    found = recover_all([states[1], states[2], None])
    assert len(set(found)) == 1
    assert isinstance(found[0], str)
    assert "none left" in found[0]


def test_state_that_is_not_finite_is_not_gone_on_from() -> None:
    states = live_states(7)
    states[2].content.slices[0].weight.view(-1)[0] = float("nan")
    found = recover_all(list(states))
    assert len(set(found)) == 1
    assert isinstance(found[0], str)
    assert "isn't finite" in found[0]
