"""Ranks that are left go on from what they have, or say why they can't."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_hetero.checkpoint import Recovered, Source, Transport, pieces
from lightning_hetero.checkpoint.content import SliceContent, SliceNeed
from lightning_hetero.checkpoint.survivors import (
    Follows,
    Keepers,
    LiveState,
    Newcomer,
    NothingLive,
    _offer_of,
    find_moves,
    recover_from_survivors,
    why_not,
)
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.owners import find_standbys
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.slices import Ownership
from tests.checkpoint.states import (
    PLANS,
    assert_is_state,
    contents,
    needs_of,
    owned,
    run_ranks,
    specs,
    uneven_plan,
)

PLAN, STANDBYS = uneven_plan(), find_standbys("aabb")
Own = LiveState | NothingLive | Newcomer


def keepers_of(plan: ParallelPlan, size: int, *, tp: bool = True, **options: Any) -> Keepers:
    """Return who keeps what; without tensor parallelism all is cut along dim 0."""
    items = specs() if tp else [replace(item, tp_dim=None) for item in specs()]
    slices = owned(plan, size, items=items, **options)
    return Keepers(slices=slices, dims={item.name: item.cut_dim for item in items})


def live_states(step: int, generation: int = 2) -> list[LiveState]:
    parts = contents(step, PLAN, 4, standbys=STANDBYS)
    keepers = keepers_of(PLAN, 4, standbys=STANDBYS)
    return [LiveState(content=part, generation=generation, keepers=keepers) for part in parts]


def recover_all(
    states: list[Own], plan: ParallelPlan | None = None, *, tp: bool = True, **options: Any
) -> list[Recovered | NothingLive]:
    size = len(states)
    new = plan or ParallelPlan.even(world_size=size, num_layers=4)
    keepers = keepers_of(new, size, tp=tp, **options)
    items = specs() if tp else [replace(item, tp_dim=None) for item in specs()]

    def action(rank: int, transport: Transport) -> Recovered | NothingLive:
        needs = needs_of(rank, new, size, items=items, **options)
        found = recover_from_survivors(needs, keepers, states[rank], transport)
        if isinstance(found, Recovered):
            assert_is_state(found, needs, 7)
        return found

    return run_ranks(size, action)


@pytest.mark.parametrize("tp", [True, False])
@pytest.mark.parametrize("lost", [{0}, {3}, {0, 1}, {2, 3}, {0, 3}])
def test_whoever_is_left_has_the_last_step_bit_for_bit(
    lost: set[int], monkeypatch: pytest.MonkeyPatch, *, tp: bool
) -> None:
    """Also where a later plan cuts along other dims, and what moves takes many messages."""
    monkeypatch.setattr(pieces, "_MESSAGE_BYTES", 100)
    states = live_states(7)
    left = [rank for rank in range(4) if rank not in lost]
    for new_rank, found in enumerate(recover_all([states[rank] for rank in left], tp=tp)):
        assert isinstance(found, Recovered)
        # Its own random numbers, and checkpoints from now on are newer than those of before.
        assert found.rank_metadata is not None
        assert found.rank_metadata["rank"] == left[new_rank]
        assert found.report.attempt == 1
        assert set(found.report.bytes_by_source) <= {Source.OWN_MEMORY, Source.PEER_MEMORY}


@pytest.mark.parametrize("name", PLANS)
def test_newcomers_get_theirs_from_the_others_under_any_plan(name: str) -> None:
    plan, size = PLANS[name]
    states: list[Own] = list(live_states(7)[: min(size, 4)])
    if size < 4:
        # All rows of two ranks that stand by for each other.
        two = ParallelPlan.even(world_size=2, num_layers=4)
        parts = contents(7, two, 2, standbys=(1, 0))
        keepers = keepers_of(two, 2, standbys=(1, 0))
        states = [LiveState(content=p, generation=2, keepers=keepers) for p in parts][:size]
    states += [Newcomer()] * (size - len(states))
    for rank, found in enumerate(recover_all(states, plan, ownership=Ownership.EVEN)):
        assert isinstance(found, Recovered)
        is_new = isinstance(states[rank], Newcomer)
        assert (found.rank_metadata is None) == is_new
        assert not is_new or set(found.report.bytes_by_source) <= {Source.PEER_MEMORY}


def test_what_a_rank_keeps_itself_does_not_travel() -> None:
    # Of two ranks that stand by for each other either has all.
    plan = ParallelPlan.even(world_size=2, num_layers=4)
    parts = contents(7, plan, 2, standbys=(1, 0))
    keepers = keepers_of(plan, 2, standbys=(1, 0))
    states = [LiveState(content=part, generation=0, keepers=keepers) for part in parts]
    (found,) = recover_all([states[1]])
    assert isinstance(found, Recovered)
    assert set(found.report.bytes_by_source) == {Source.OWN_MEMORY}
    # And those that are left take turns to give.
    wanted = keepers_of(ParallelPlan.even(world_size=6, num_layers=4), 6, ownership=Ownership.EVEN)
    moves = find_moves(keepers, wanted, {0: 0, 1: 1})
    assert {m.source for m in moves if m.target > 1} == {0, 1}
    assert all(m.source == m.target for m in moves if m.target <= 1)


def test_ranks_that_do_not_go_together_say_why_alike() -> None:
    states = live_states(7)
    behind, older = live_states(6)[1], live_states(7, generation=1)[1]
    ended = replace(states[1], follows=Follows.END)
    torn = NothingLive("it was lost in the middle of an optimizer's step")
    for own, told in (
        ([states[0], behind, states[3]], "different steps (rank 0 to 7 before a step, rank 1 to 6"),
        ([states[0], ended, states[3]], "rank 1 to 7 before the end of an epoch or of training"),
        ([states[0], older, states[3]], "different steps"),
        ([states[0], torn, states[3]], "rank 1 has nothing of the last step: it was lost in the"),
        ([states[1], states[3]], "of the generation before"),
        ([states[0], states[2]], "kept by lost ranks alone ([1, 3] of the generation before)"),
        ([states[0], states[2], Newcomer()], "kept by lost ranks alone ([1, 3] of"),
        ([Newcomer(), *states], "rank 0 has trained no step"),
    ):
        found = recover_all(list(own))
        assert all(isinstance(item, NothingLive) for item in found)
        assert len(set(found)) == 1
        assert isinstance(found[0], NothingLive)
        assert told in found[0].why


class Poison:
    """Can be pickled, and never comes back."""

    def __reduce__(self) -> Any:
        return (int, ("no number",))


@pytest.mark.parametrize("value", [lambda: None, Poison()])
def test_state_that_cannot_be_told_is_no_reason_to_end(value: Any) -> None:
    states = live_states(7)
    bad = replace(states[0], content=replace(states[0].content, metadata={"x": value}))
    found = recover_all([bad, states[1], states[2], states[3]])
    assert len(set(found)) == 1
    assert isinstance(found[0], NothingLive)
    assert "Error" in found[0].why


def test_rows_that_a_rank_cannot_give_or_take_end_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails on one of them, no other one waits for a message that never comes."""
    states = live_states(7)

    def fails(*_: Any) -> Any:
        raise MemoryError("none left")

    for name in ("cut_piece", "unpack", "joined"):
        with monkeypatch.context() as patch:
            patch.setattr(f"lightning_hetero.checkpoint.survivors.{name}", fails)
            found = recover_all([states[1], states[2], Newcomer()])
        assert len(set(found)) == 1, name
        assert isinstance(found[0], NothingLive)
        assert "none left" in found[0].why


def test_state_that_cannot_be_cut_serves_whoever_needs_just_its_rows() -> None:
    def content(start: int, stop: int, **whole: torch.Tensor) -> SliceContent:
        return SliceContent(
            parameter="w",
            unit=0,
            shape=(4, 2),
            dim=0,
            start=start,
            stop=stop,
            weight=torch.arange(8.0).reshape(4, 2)[start:stop],
            state={"count": torch.tensor(3.0)},
            whole_state=whole,
        )

    def get(need: SliceNeed, *parts: SliceContent) -> Any:
        cut = [pieces.cut_piece(p, max(p.start, 1), p.stop) for p in parts]
        sent = [p for message in pieces.pack(lambda: cut) for p in pieces.unpack(message)]
        return pieces.joined(need, sent)

    whole = torch.ones(2, 2)
    need = SliceNeed("w", (4, 2), 0, 1, 4)
    found = get(need, content(0, 2), content(2, 4))
    assert found.weight.tolist() == [[2, 3], [4, 5], [6, 7]]
    assert found.state["count"].item() == 3
    with pytest.raises(CheckpointError, match="'q' of w is of other rows"):
        get(need, content(0, 2), content(2, 4, q=whole))
    same = get(SliceNeed("w", (4, 2), 0, 2, 4), content(2, 4, q=whole))
    assert torch.equal(same.state["q"], whole)
    with pytest.raises(CheckpointError, match=r"Rows \[3, 4\) of w didn't come"):
        get(need, content(0, 3))


def test_nobody_lost_is_enough_as_well() -> None:
    offers = [_offer_of(state) for state in live_states(7)]
    assert why_not(offers, owned(PLAN, 4, standbys=STANDBYS)) == ""
