"""Members of a generation show each other what they took last."""

from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from lightning_hetero.runtime.generation.board import MembersBoard
from lightning_hetero.runtime.generation.membership import Membership


class Signs:
    """Signs of life of ranks, of which some are silent."""

    def __init__(self, *silent: int) -> None:
        self._silent, self._beats = silent, 0

    def beats_of(self, global_rank: int) -> int:
        self._beats += 1
        return 0 if global_rank in self._silent else self._beats

    def silence_since(self, global_rank: int, beats: int) -> float:
        return 3600.0 if global_rank in self._silent else 0.0


def boards(store: dist.Store, signs: Signs, count: int = 4) -> list[MembersBoard]:
    everyone = [Membership(store, number=n, node="a", patience_s=20.0) for n in range(count)]
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(lambda member: member.form(range(count)), everyone))
    return [MembersBoard(member, lambda: signs, 1.0) for member in everyone]


def test_a_member_waits_for_all_that_are_not_gone() -> None:
    """One is dead, another one frozen, which nobody but those who wait can see."""
    store = dist.HashStore()
    first, second, dead, frozen = boards(store, Signs(3))
    dead._membership.tell_gone(2, "Its process ended.")
    with ThreadPoolExecutor(1) as threads:
        first.lay_open(4, "[0.5]")
        found = threads.submit(lambda: sorted(first.await_others()))
        assert not found.done()
        second.lay_open(5, "[1.5]")
        assert found.result(timeout=60) == [(5, "[1.5]")]
    assert frozen._membership.reason_of(3) == "It showed no sign of life."
    assert list(second.await_others()) == [(4, "[0.5]")]


def test_what_a_lost_member_had_shown_counts() -> None:
    first, second = boards(dist.HashStore(), Signs(), count=2)
    second.lay_open(1, "[2.5]")
    second._membership.tell_gone(1, "Its process ended.")
    first.lay_open(0, "[]")
    assert list(first.await_others()) == [(1, "[2.5]")]
