"""Members of one process, each in a thread, agree on generations in one store."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from lightning_hetero.core.errors import PeerError
from lightning_hetero.runtime.generation.membership import Membership
from lightning_hetero.runtime.generation.records import (
    Generation,
    is_anybody_left,
    reason_of,
)


def members(store: dist.Store, count: int = 4) -> list[Membership]:
    nodes = ["a", "a", "b", "b"]
    return [Membership(store, number=n, node=nodes[n], patience_s=20.0) for n in range(count)]


def form(taking_part: list[Membership], expected: range = range(4)) -> list[Generation]:
    with ThreadPoolExecutor(len(taking_part)) as threads:
        return list(threads.map(lambda member: member.form(expected), taking_part))


def test_those_who_are_left_agree_on_one_generation_and_keep_their_order() -> None:
    store = dist.HashStore()
    everyone = members(store)
    first = form(everyone)
    assert len({str(item) for item in first}) == 1
    assert first[0].world_size == 4
    everyone[0].tell_gone(1, "Its process 7 ended with SIGKILL.")
    assert everyone[2].find_gone() == (1, "Rank 1 is gone: Its process 7 ended with SIGKILL.")
    everyone[2].tell_gone(1, "It showed no sign of life.")
    assert store.get("gone") == b"1 "  # However many say so.
    left = [everyone[0], everyone[2], everyone[3]]
    second = form(left)
    assert [item.number for item in second] == [1, 1, 1]
    assert [second[0].rank_of(number) for number in range(4)] == [0, None, 1, 2]
    assert [second[0].local_rank_of(rank) for rank in range(3)] == [0, 0, 1]
    assert first[0].without(second[0]) == (1,)
    # Nobody of this generation is gone.
    assert everyone[3].find_gone() is None


def test_a_member_that_was_given_up_can_never_act_in_a_later_generation() -> None:
    store = dist.HashStore()
    everyone = members(store)
    form(everyone)
    frozen = everyone.pop(2)
    with ThreadPoolExecutor(3) as threads:
        formed = threads.map(lambda m: m.form(range(4), lambda number: number == 2), everyone)
    assert {item.world_size for item in formed} == {3}
    for _ in range(3):
        form(everyone)
    # However late.
    with pytest.raises(PeerError, match=r"The others go on without this process \(member 2"):
        frozen.form(range(4))
    # Nor under the old names: those of each generation begin with its number.
    assert reason_of(store, 2)
    assert is_anybody_left(store)


def test_who_was_cut_off_from_the_store_forms_nothing() -> None:
    class Unreachable(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("no route to host")

    lone = Membership(Unreachable(), number=0, node="a")
    with pytest.raises(PeerError, match=r"store of the membership is gone.*no route to host"):
        lone.form(range(1))
    assert lone.generation is None


def test_a_run_begins_with_all_who_were_started_or_not_at_all() -> None:
    """With fewer it would train on fewer samples than was asked for."""
    everyone = members(dist.HashStore(), 3)
    everyone[0].tell_gone(1, "Its process 7 ended with SIGKILL.")
    with ThreadPoolExecutor(2) as threads:
        forming = [threads.submit(everyone[rank].form, range(3)) for rank in (0, 2)]
        for member in forming:
            with pytest.raises(PeerError, match=r"before training began\. rank 1: Its process 7"):
                member.result()


def test_who_leaves_is_not_waited_for_by_those_who_were_not_told() -> None:
    """All had stopped for it, and one was lost before the others had heard who leaves."""
    store = dist.HashStore()
    everyone = members(store)
    form(everyone)
    signs = SimpleNamespace(silence_s=lambda _: 0.0)
    with ThreadPoolExecutor(3) as threads:
        leaver = threads.submit(everyone[3].wait_for_next, 20.0)
        others = [threads.submit(item.form_next, signs, 20.0) for item in everyone[:2]]
        everyone[3].tell_gone(2, "Its process 7 ended with SIGKILL.")
        formed = [item.result(10.0)[1] for item in others]
        leaver.result(10.0)
    assert [member.number for member in formed[0].members] == [0, 1]
    assert everyone[0].reason_of(3) == "It was told to leave."


@pytest.mark.parametrize(
    ("lost", "leaving", "goes"),
    [
        ((), (0,), True),
        ((), (1,), False),
        ((), (0, 1), True),
        ((), (1, 2), False),
        ((0,), (0,), True),
        ((0,), (1,), False),
        ((0, 1), (0,), False),
    ],
)
def test_the_store_goes_with_whom_it_was_started_or_the_last_of_its_node(
    lost: tuple[int, ...], leaving: tuple[int, ...], *, goes: bool
) -> None:
    everyone = members(dist.HashStore())
    form(everyone)
    for number in lost:
        everyone[3].tell_gone(number, "SIGKILL")
    left = [item for item in everyone if item.number not in lost]
    form(left)
    assert left[-1].loses_store(frozenset(leaving)) == goes
