"""Joiners and members of one process, in one store: every way in which one comes, or doesn't."""

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
PATIENT_S = 20.0


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
