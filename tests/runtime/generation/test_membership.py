"""Members of one process, each in a thread, agree on generations in one store."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from lightning_hetero.core.errors import PeerError
from lightning_hetero.runtime.generation.log import Generation
from lightning_hetero.runtime.generation.membership import Membership


class Signs:
    """A heartbeat of which a test says who is silent."""

    def __init__(self, number: int, silent: tuple[int, ...] = ()) -> None:
        self.number, self.silent, self.num_news, self.interval_s = number, silent, 0, 0.02

    def silences_s(self, numbers: Sequence[int]) -> list[float]:
        return [100.0 * (number in self.silent) for number in numbers]


def member_of(store: dist.Store, number: int, **other: Any) -> Membership:
    options = {"node": "aabb"[number], "facts": {}, "silence_s": 20.0, "patience_s": 20.0, **other}
    return Membership(store, Signs(number), **options)  # type: ignore[arg-type]


def begun(store: dist.Store, count: int = 4) -> list[Membership]:
    """Return the members of a run whose first generation has formed."""
    everyone = [member_of(store, number) for number in range(count)]
    with ThreadPoolExecutor(count) as threads:
        formed = list(threads.map(lambda member: member.form_first(count), everyone))
    assert {item.numbers for item in formed} == {tuple(range(count))}
    return everyone


def form(left: list[Membership]) -> list[Generation]:
    with ThreadPoolExecutor(len(left)) as threads:
        return [new for _, new in threads.map(lambda member: member.form_next(), left)]


def test_those_who_are_left_agree_on_one_generation_and_keep_their_order() -> None:
    store = dist.HashStore()
    everyone = begun(store)
    first = everyone[0].generation
    everyone[0].tell_gone(1, "Its process 7 ended with SIGKILL.")
    num_entries = len(store.get("log/1").splitlines())
    everyone[2].tell_gone(1, "It showed no sign of life.")
    assert len(store.get("log/1").splitlines()) == num_entries, "however many say so"
    assert everyone[2].find_gone() == (1, "Rank 1 is gone: Its process 7 ended with SIGKILL.")
    left = [everyone[0], everyone[2], everyone[3]]
    second = form(left)
    assert [item.number for item in second] == [1, 1, 1]
    assert [second[0].rank_of(number) for number in range(4)] == [0, None, 1, 2]
    assert [second[0].local_rank_of(rank) for rank in range(3)] == [0, 0, 1]
    assert first.without(second[0]) == (1,)
    # Nobody of this generation is gone.
    assert everyone[3].find_gone() is None


def test_who_was_cut_off_from_the_store_forms_nothing() -> None:
    class Unreachable(dist.HashStore):
        def get(self, key: str) -> bytes:
            raise dist.DistNetworkError("no route to host")

    lone = member_of(Unreachable(), 0)
    with pytest.raises(PeerError, match=r"store of the membership is gone.*no route to host"):
        lone.form_first(1)
    assert lone.generation is None


def test_a_run_begins_with_all_who_were_started_or_not_at_all() -> None:
    """With fewer it would train on fewer samples than was asked for."""
    store = dist.HashStore()
    everyone = [member_of(store, number) for number in range(3)]
    everyone[0].tell_gone(1, "Its process 7 ended with SIGKILL.")
    with ThreadPoolExecutor(2) as threads:
        forming = [threads.submit(everyone[rank].form_first, 3) for rank in (0, 2)]
        for member in forming:
            with pytest.raises(PeerError, match=r"before training began\. rank 1: Its process 7"):
                member.result()


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
    everyone = begun(dist.HashStore())
    for number in lost:
        everyone[3].tell_gone(number, "SIGKILL")
    left = [item for item in everyone if item.number not in lost]
    form(left)
    assert left[-1].loses_store(frozenset(leaving)) == goes
