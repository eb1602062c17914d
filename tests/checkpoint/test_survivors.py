"""Ranks that are left go on from what they have, or say why they can't."""

from dataclasses import replace

import pytest

from lightning_hetero.checkpoint import Recovered, Source, Transport
from lightning_hetero.checkpoint.survivors import (
    LiveState,
    NothingLive,
    recover_from_survivors,
    why_not,
)
from lightning_hetero.core.owners import find_standbys
from lightning_hetero.core.plan import ParallelPlan
from tests.checkpoint.states import (
    assert_is_state,
    contents,
    needs_of,
    owned,
    run_ranks,
    uneven_plan,
)

PLAN, STANDBYS = uneven_plan(), find_standbys("aabb")
OWNERS = owned(PLAN, 4, standbys=STANDBYS)


def live_states(step: int, generation: int = 2) -> list[LiveState]:
    parts = contents(step, PLAN, 4, standbys=STANDBYS)
    return [LiveState(content=part, generation=generation, owners=OWNERS) for part in parts]


def recover_all(
    states: list[LiveState | NothingLive], *, num_layers: int = 4
) -> list[Recovered | NothingLive]:
    plan = ParallelPlan.even(world_size=len(states), num_layers=num_layers)

    def action(rank: int, transport: Transport) -> Recovered | NothingLive:
        needs = needs_of(rank, plan, len(states))
        found = recover_from_survivors(needs, states[rank], transport)
        if isinstance(found, Recovered):
            assert_is_state(found, needs, 7)
        return found

    return run_ranks(len(states), action)


@pytest.mark.parametrize("lost", [{0}, {3}, {0, 1}, {2, 3}, {0, 3}])
def test_whoever_is_left_has_the_last_step_bit_for_bit(lost: set[int]) -> None:
    states = live_states(7)
    left = [rank for rank in range(4) if rank not in lost]
    for new_rank, found in enumerate(recover_all([states[rank] for rank in left])):
        assert isinstance(found, Recovered)
        # Its own random numbers, and checkpoints from now on are newer than those of before.
        assert found.rank_metadata is not None
        assert found.rank_metadata["rank"] == left[new_rank]
        assert found.report.attempt == 1
        assert set(found.report.bytes_by_source) <= {Source.OWN_MEMORY, Source.PEER_MEMORY}


def test_what_a_rank_keeps_itself_does_not_travel() -> None:
    states = live_states(7)

    def action(rank: int, transport: Transport) -> Recovered | NothingLive:
        plan = ParallelPlan.even(world_size=1, num_layers=4)
        return recover_from_survivors(needs_of(0, plan, 1), states[0], transport)

    # Of two ranks that stand by for each other either has all.
    parts = contents(7, ParallelPlan.even(world_size=2, num_layers=4), 2, standbys=(1, 0))
    owners = owned(ParallelPlan.even(world_size=2, num_layers=4), 2, standbys=(1, 0))
    states = [LiveState(content=part, generation=0, owners=owners) for part in parts]
    (found,) = run_ranks(1, action)
    assert isinstance(found, Recovered)
    assert set(found.report.bytes_by_source) == {Source.OWN_MEMORY}


def test_ranks_that_do_not_go_together_say_why_alike() -> None:
    states = live_states(7)
    behind, older = live_states(6)[1], live_states(7, generation=1)[1]
    torn = NothingLive("it was lost in the middle of an optimizer's step")
    for own, told in (
        ([states[0], behind, states[3]], "different steps (rank 0 step 7, rank 1 step 6, rank 2"),
        ([states[0], older, states[3]], "different steps"),
        ([states[0], torn, states[3]], "rank 1 has nothing of the last step: it was lost in the"),
        ([states[1], states[3]], "of the generation before"),
        ([states[0], states[2]], "kept by lost ranks alone ([1, 3] of the generation before)"),
    ):
        found = recover_all(list(own))
        assert all(isinstance(item, NothingLive) for item in found)
        assert len(set(found)) == 1
        assert isinstance(found[0], NothingLive)
        assert told in found[0].why


def test_state_that_cannot_be_kept_is_no_reason_to_end() -> None:
    states = live_states(7)
    bad = replace(states[1], content=replace(states[1].content, rank_metadata={"x": object()}))
    found = recover_all([states[0], bad, states[2], states[3]])
    assert len(set(found)) == 1
    assert isinstance(found[0], NothingLive)
    assert "rank_metadata entry 'x'" in found[0].why


def test_nobody_lost_is_enough_as_well() -> None:
    offers = [{"generation": 0, "step": 1, "rank": rank, "size": 4} for rank in range(4)]
    assert why_not(offers, OWNERS) == ""
