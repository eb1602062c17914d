"""Members of one process, each in a thread, agree on generations in one store."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from lightning_hetero.core.errors import PeerError
from lightning_hetero.runtime.generation.log import Generation, Log, Member
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


def test_an_entry_counts_also_if_a_generation_forms_at_that_moment() -> None:
    """One that is behind the end of a list isn't lost, and says nothing of who has formed it."""
    store = dist.HashStore()
    log = Log(store)
    for number in range(2):
        log.append(0, "here", number, ["a", False])

    class Forms(Log):
        """Another process forms the generation before each first entry of a list."""

        def append(self, coming: int, kind: str, member: int, value: object = "") -> None:
            if coming == 0:
                log.append(0, "formed", 0)
            super().append(coming, kind, member, value)

    state = Forms(store).note("gone", 1, "late")
    assert state.generation == Generation(number=0, members=(Member(0, "a"), Member(1, "a")))
    assert log.read() == state
    assert state.gone == {1: "late"}
    assert state.is_anybody_left


def test_who_comes_late_needn_t_read_what_was_long_ago() -> None:
    """And a look costs one short call as long as nothing has happened."""

    calls: list[str] = []

    class Counts(dist.HashStore):
        def get(self, key: str) -> bytes:
            calls.append(key)
            return super().get(key)

        def check(self, keys: list[str]) -> bool:
            calls.extend(keys)
            return super().check(keys)

    everyone = begun(store := Counts())
    everyone[0].tell_gone(3, "Its process 7 ended with SIGKILL.")
    everyone.pop()
    for _ in range(20):
        form(everyone)
    late = Log(store)
    calls.clear()
    state = late.read()
    assert (state.generation, state.gone) == (everyone[0].generation, everyone[0]._log.read().gone)
    assert len(calls) < 8
    num_calls = len(calls)
    late.read()
    assert len(calls) == num_calls


def test_a_member_that_was_given_up_can_never_act_in_a_later_generation() -> None:
    everyone = begun(dist.HashStore())
    frozen = everyone.pop(2)
    for member in everyone:
        member._heartbeat.silent = (2,)
    assert {item.world_size for item in form(everyone)} == {3}
    for _ in range(3):
        form(everyone)
    # However late.
    with pytest.raises(PeerError, match=r"without this process \(member 2.*no sign of life"):
        frozen.form_next()


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


def test_who_leaves_is_not_waited_for_by_those_who_were_not_told() -> None:
    """All had stopped for it, and one was lost before the others had heard who leaves."""
    everyone = begun(dist.HashStore())
    with ThreadPoolExecutor(3) as threads:
        leaver = threads.submit(everyone[3].wait_for_next, 20.0)
        others = [threads.submit(item.form_next) for item in everyone[:2]]
        everyone[3].tell_gone(2, "Its process 7 ended with SIGKILL.")
        formed = [item.result(10.0)[1] for item in others]
        leaver.result(10.0)
    assert formed[0].numbers == (0, 1)
    assert everyone[0]._log.read().gone[3] == "It was told to leave."


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
