"""Joiners and members of one process, in one store: every way in which one comes, or doesn't."""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from threading import Event, Thread
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_hetero.core.errors import CheckpointError, ConfigurationError, PeerError
from lightning_hetero.runtime.generation.entering import join_membership, split_address
from lightning_hetero.runtime.generation.keeper import JOIN
from lightning_hetero.runtime.generation.log import Generation
from lightning_hetero.runtime.generation.membership import (
    Membership,
    begin_numbers,
    draw_number,
)
from lightning_hetero.runtime.ranks import meeting
from lightning_hetero.runtime.ranks.heartbeat import Heartbeat
from lightning_hetero.strategy import processes
from lightning_hetero.strategy.generations import Generations, size_that_stays
from lightning_hetero.strategy.processes import Processes
from lightning_hetero.strategy.trainable import facts_of_fit

FACTS = {"torch": "2.13", "parameters": "7 of digest 1234abcd"}
PATIENT_S, SHORT_S = 20.0, 0.1


class Signs(Heartbeat):
    """A heartbeat whose rounds the test may call itself, and for which only joiners are silent."""

    members: frozenset[int] = frozenset()

    def silences_s(self, numbers: Sequence[int]) -> list[float]:
        found = zip(numbers, super().silences_s(numbers), strict=True)
        return [0.0 if number in self.members else seconds for number, seconds in found]

    def beat(self) -> None:
        self._round()


def member_of(store: dist.Store, number: int, node: str = "a", **other: str) -> Membership:
    heartbeat = Signs(store, number=number, interval_s=0.02)
    facts, limits = {**FACTS, **other}, {"silence_s": PATIENT_S, "patience_s": 20.0}
    return Membership(store, heartbeat, node=node, facts=facts, **limits)


def joiner_of(store: dist.Store, **other: str) -> Membership:
    """Return a joiner that doesn't beat by itself."""
    return member_of(store, draw_number(store), "b", **other)


def ask(joiner: Membership) -> None:
    joiner._log.note("asking", joiner.number)


def run_of(count: int) -> tuple[dist.Store, list[Membership]]:
    """Return the store and the members of a run that trains in its generation 0."""
    store = dist.HashStore()
    begin_numbers(store, count)
    members = [member_of(store, number) for number in range(count)]
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(lambda member: member.form_first(count), members))
    return store, members


class Coming:
    """A joiner on a thread of its own: it beats until it is called, refused, or stopped."""

    def __init__(self, store: dist.Store, **other: str) -> None:
        self.membership = joiner_of(store, **other)
        self.number = self.membership.number
        self.membership._heartbeat.begin()
        self.result: Generation | Exception | None = None
        self._thread = Thread(target=self._come, daemon=True)
        self._thread.start()

    def _come(self) -> None:
        try:
            self.result = self.membership.join(20.0)
        except Exception as error:
            self.result = error
        finally:
            self.membership._heartbeat.end(20.0)

    def wait(self) -> Generation | Exception:
        self._thread.join(20.0)
        assert self.result is not None
        return self.result


def looks(member: Membership) -> bool:
    """Look once, as rank 0 does between steps, with the news that its heartbeat has read."""
    member._heartbeat.beat()
    return member.look_for_joiners()


def see(member: Membership) -> None:
    """Look, as rank 0 does between steps, until joiners wait."""
    for _ in range(2000):
        if looks(member):
            return
        Event().wait(0.005)
    raise AssertionError("nobody has come")


def form_next(
    members: list[Membership], leaving: tuple[int, ...] = (), silence_s: float = PATIENT_S
) -> list[Generation]:
    staying = [m for m in members if m.generation.rank_of(m.number) not in leaving]
    for member in staying:
        member._heartbeat.members = frozenset(other.number for other in members)
        member._silence_s = silence_s
    with ThreadPoolExecutor(len(staying)) as threads:
        return [new for _, new in threads.map(lambda member: member.form_next(leaving), staying)]


def test_where_a_rank_was_lost_who_waits_comes_one_generation_later() -> None:
    """Also if some of them had stopped to let it in: the first of all decides, for all."""
    store, members = run_of(3)
    coming = Coming(store)
    see(members[0])
    members[0].tell_gone(1, "SIGKILL")
    left = [members[0], members[2]]
    members[0]._say_here(1, calls_joiners=False)
    assert form_next(left)[0].numbers == (0, 2)
    assert coming.result is None
    assert form_next(left)[0].numbers == (0, 2, 3)
    assert isinstance(coming.wait(), Generation)


@pytest.mark.parametrize(
    ("name", "value"), [("torch", "2.12"), ("parameters", "8 of digest 99999999")]
)
def test_one_that_runs_something_else_is_refused_and_the_others_notice_nothing(
    name: str, value: str
) -> None:
    store, members = run_of(2)
    coming = Coming(store, **{name: value})
    while coming.result is None:
        assert not looks(members[0])
    error = coming.wait()
    assert isinstance(error, ConfigurationError)
    assert f"it has {name} {value}, the run {FACTS[name]}. Give it the same" in str(error)
    assert members[0].find_gone() is None
    assert coming.number not in members[0]._log.read().asking
    assert not looks(members[1]), "also another rank 0 doesn't ask again"


def test_one_that_dies_holds_up_nobody_at_any_stage() -> None:
    """After it drew its number; after its first beat; when admitted; when called; when it is in."""
    store, members = run_of(2)
    draw_number(store)
    asked = joiner_of(store)
    ask(asked)
    asked._heartbeat.beat()
    for _ in range(5):
        assert not looks(members[0]), "nobody has beaten twice"
    joiner = joiner_of(store)
    ask(joiner)
    joiner._heartbeat.beat()
    assert not looks(members[0])
    joiner._heartbeat.beat()
    assert looks(members[0])
    # It is called, and nothing comes: it is given up for ever, and only once waited for.
    assert form_next(members, silence_s=SHORT_S)[0].numbers == (0, 1)
    assert members[0]._log.read().gone[joiner.number] == "It showed no sign of life."
    assert not looks(members[0])
    with pytest.raises(PeerError, match="goes on without this process: It showed no sign"):
        joiner.join(20.0)
    # One of which its keeper tells is not waited for at all.
    told = Coming(store)
    see(members[0])
    members[1].tell_gone(told.number, "Its process ended with SIGKILL.")
    assert form_next(members)[0].numbers == (0, 1)
    assert isinstance(told.wait(), PeerError)
    # One that said that it is here and died then is found lost in the next generation.
    late = Coming(store)
    see(members[0])
    assert form_next(members)[0].world_size == 3
    members[0].tell_gone(late.number, "It stopped answering.")
    assert members[1].find_gone() == (2, "Rank 2 is gone: It stopped answering.")
    assert form_next(members)[0].world_size == 2


def test_any_order_of_coming_leaving_and_dying_ends_in_one_generation_of_who_lives() -> None:
    """Fourteen changes, each of up to two joiners, a leaver and a loss each, one run."""
    draw = random.Random(19)
    store, members = run_of(3)
    for generation in range(1, 15):
        coming = [Coming(store) for _ in range(draw.randint(0, 2))]
        rank_0 = members[0]
        if coming:
            see(rank_0)
        dies = draw.random() < 0.3 and len(members) > 2
        leaves = draw.random() < 0.3 and len(members) > 3
        if dies:
            rank_0.tell_gone(members.pop().number, "It died.")
        leaving = (1,) if leaves else ()
        formed = form_next(members, leaving)
        assert {item.number for item in formed} == {generation}
        assert len({str(item) for item in formed}) == 1
        if leaves:
            members.pop(1)
        called = [c for c in coming if formed[0].rank_of(c.number) is not None]
        members += [c.membership for c in called if c.wait() == formed[0]]
        assert list(formed[0].numbers) == [m.number for m in members]
        # Who came too late for this one waits on, and may be called for the next.
        for other in coming:
            if other not in called:
                rank_0.tell_gone(other.number, "The test goes on.")
                other.wait()


def test_a_joiner_is_told_why_nobody_lets_it_in() -> None:
    store, members = run_of(1)
    with pytest.raises(PeerError, match=r"Nobody has let this process in for 0 s.*start_timeout"):
        joiner_of(store).join(0.1)
    members[0].tell_end()
    with pytest.raises(PeerError, match="trained to its end"):
        joiner_of(store).join(20.0)
    store, members = run_of(2)
    for member in members:
        member.tell_gone(member.number, "SIGKILL")
    with pytest.raises(
        PeerError, match=r"Nobody is left of the run: it has failed, or was started"
    ):
        joiner_of(store).join(20.0)


def test_where_only_joiners_are_left_nobody_trains_something_else() -> None:
    assert size_that_stays([0, 4, 4]) == 4
    with pytest.raises(CheckpointError, match="All ranks that had trained were lost"):
        size_that_stays([0, 0])


def test_a_joiner_whose_store_goes_is_told_so_at_once() -> None:
    class Goes(dist.HashStore):
        def get(self, key: str) -> bytes:
            raise dist.DistNetworkError("connection reset")

    with pytest.raises(PeerError, match="store is gone, so the run has ended, or lost its first"):
        joiner_of(Goes()).join(1000.0)


@pytest.mark.parametrize("comes", [True, False])
def test_who_joins_or_leaves_ends_if_the_store_never_answers(
    monkeypatch: pytest.MonkeyPatch, *, comes: bool
) -> None:
    """A call of a frozen store can't be cancelled."""
    ended, brief = Event(), timedelta(seconds=0.1)

    def freeze(*_: Any, **__: Any) -> None:
        assert ended.wait(20.0)
        raise PeerError("The process has ended.")

    monkeypatch.setattr(meeting, "end_process", lambda *_: ended.set())
    monkeypatch.setattr(processes, "join_membership", freeze)
    joining = Processes(timeout=brief, start_timeout=brief, backend="gloo")
    joining.outlive_ranks(brief)
    act = partial(joining.meet, LightningEnvironment(), torch.device("cpu"))
    if not comes:
        joining.membership = mock.Mock(number=1, patience_s=0.1, wait_for_next=freeze)
        act = joining.wait_until_others_go_on
    with told_to_join("127.0.0.1:1"), pytest.raises(PeerError, match="has ended"):
        act()


@contextmanager
def told_to_join(address: str) -> Iterator[None]:
    with mock.patch.dict("os.environ", {JOIN: address}):
        yield


def test_a_wrong_address_says_what_to_give() -> None:
    assert split_address("10.0.0.1:29500") == ("10.0.0.1", 29500)
    for wrong in ("", "10.0.0.1", "10.0.0.1:port", ":29500"):
        with (
            told_to_join(wrong),
            pytest.raises(ConfigurationError, match=r"must be host:port of the run's store"),
        ):
            join_membership(FACTS, start_timeout=timedelta(seconds=5), silence_s=2.0)


def test_where_no_run_is_one_is_told_so_in_time() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with told_to_join(f"127.0.0.1:{store.port}"), pytest.raises(PeerError, match="No run to join"):
        join_membership(FACTS, start_timeout=timedelta(seconds=0.3), silence_s=2.0)


def test_in_place_a_trainer_fits_once_and_others_join_the_first_fit_of_a_script() -> None:
    timeout = timedelta(seconds=20)
    ours = Processes(timeout=timeout, start_timeout=timeout, backend="gloo")
    fits = Generations(mock.Mock(processes=ours), mock.MagicMock(), timeout)
    ours.end_generations()
    ours.meet(LightningEnvironment(), torch.device("cpu"))  # Such as a test after the fit.
    assert ours.membership is None
    with pytest.raises(ConfigurationError, match="Make another Trainer for each other fit"):
        Generations(fits._strategy, mock.MagicMock(), timeout)
    assert facts_of_fit(None) == {"fits before this one": "some"}
