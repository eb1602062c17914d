"""A place that fails is tried again; one that hangs costs neither threads nor peers."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero.checkpoint import (
    CheckpointWriter,
    LocalStore,
    Peers,
    Recovered,
    RetryingStore,
    Tier,
    TierKind,
)
from lightning_hetero.checkpoint.deadlines import HangingError
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.plan import ParallelPlan
from tests.checkpoint.stand_ins import FaultyStore, MemoryStore
from tests.checkpoint.states import (
    TWO,
    Nodes,
    assert_is_state,
    contents,
    disk,
    needs_of,
    recover,
    remote,
    run_ranks,
    save_all,
    write,
)

THREE = ParallelPlan.even(world_size=3, num_layers=4)


class Hanging:
    """A `before` that doesn't come back from some calls, until it is let go."""

    def __init__(self, hangs: Callable[[str, str], bool]) -> None:
        self.hangs = hangs
        self.let_go = threading.Event()
        self.num_hung = 0

    def __call__(self, verb: str, name: str) -> None:
        if self.hangs(verb, name):
            self.num_hung += 1
            assert self.let_go.wait(60)


class Flaky:
    """Fails a number of times with one error."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.left = failures
        self.error = error

    def __call__(self, verb: str, name: str) -> None:
        if self.left:
            self.left -= 1
            raise self.error


def test_errors_that_may_pass_are_tried_again_and_others_raised_at_once() -> None:
    inner, flaky = MemoryStore(), Flaky(2, ConnectionError("500"))
    RetryingStore(FaultyStore(inner, flaky), pause_s=0.0).write("x", [b"ab", b"c"])
    assert inner.files == {"x": b"abc"}
    with pytest.raises(CheckpointError, match=r"memory in 3 attempts.*500"):
        RetryingStore(FaultyStore(inner, Flaky(9, ConnectionError("500"))), pause_s=0.0).list()
    for error in (
        FileNotFoundError(2, "no"),
        PermissionError(13, "no"),
        OSError(errno.ENOSPC, "full"),
        OSError(errno.EROFS, "read-only"),
    ):
        flaky = Flaky(9, error)
        with pytest.raises(type(error)) as raised:
            RetryingStore(FaultyStore(MemoryStore(), flaky)).list()
        assert raised.value is error
        assert flaky.left == 8


@pytest.mark.parametrize("verb", ["write", "read", "list", "remove"])
def test_a_try_that_hangs_is_given_up_and_comes_too_late(verb: str) -> None:
    hanging = Hanging(lambda called, name: called == verb and not hanging.num_hung)
    inner = MemoryStore()
    inner.files["x"] = b"old"
    store = RetryingStore(FaultyStore(inner, hanging), pause_s=0.0, stall_s=0.5)
    answers: dict[str, Callable[[], Any]] = {
        "write": lambda: store.write("x", [b"ne", b"w"]),
        "read": lambda: store.read("x"),
        "list": store.list,
        "remove": lambda: store.remove(["x"]),
    }
    assert answers[verb]() == {"read": b"old", "list": {"x": 3}}.get(verb)
    hanging.let_go.set()
    join_all("checkpoint-store")
    assert inner.files == {"write": {"x": b"new"}, "remove": {}}.get(verb, {"x": b"old"})


def test_a_local_write_that_was_given_up_never_replaces_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, let_go, sync = [True], threading.Event(), os.fsync

    def slow_sync(descriptor: int) -> None:
        if hanging and hanging.pop():
            assert let_go.wait(60)
        sync(descriptor)

    store = LocalStore(tmp_path, stall_s=0.5)
    monkeypatch.setattr(os, "fsync", slow_sync)
    with pytest.raises(TimeoutError):
        store.write("a", [b"old"])
    store.write("a", [b"new"])
    let_go.set()
    join_all("checkpoint-store")
    assert store.read("a") == b"new"
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def join_all(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(20)


def num_threads() -> int:
    return sum(thread.name == "checkpoint-store" for thread in threading.enumerate())


def test_a_place_that_hangs_for_days_holds_a_bounded_number_of_threads() -> None:
    hanging = Hanging(lambda verb, name: True)
    inner = FaultyStore(MemoryStore(), hanging)
    store = RetryingStore(inner, attempts=5, pause_s=0.0, stall_s=0.01)
    before = num_threads()
    for _ in range(40):
        with pytest.raises((TimeoutError, CheckpointError)):
            store.list()
    assert hanging.num_hung == 8
    assert num_threads() - before <= 8
    # Nothing more is begun, so the answer comes at once.
    with pytest.raises(HangingError, match="8 operations hang"):
        store.read("x")
    hanging.hangs = lambda verb, name: False
    hanging.let_go.set()
    join_all("checkpoint-store")
    assert store.list() == {}


@pytest.mark.parametrize("hangs", ["list", "read"])
def test_a_tier_that_hangs_is_its_own_failure_in_a_recovery(hangs: str) -> None:
    """Where it hangs as it reads for another rank, that one takes another copy."""
    nodes = Nodes(["a", "b"])
    save_all(nodes, ["a", "b"], contents(2, TWO, 2))
    needs = [needs_of(rank, TWO, 2) for rank in range(2)]
    part = {name: data for name, data in nodes.disk["a"].files.items() if "00000" in name}
    nodes.lose("a")
    nodes.disk["b"].files.update(part)
    hanging = Hanging(
        lambda verb, name: verb == hangs and (verb == "list" or "part-00000.weights" in name)
    )

    def look(rank: int, peers: Peers) -> Recovered | None:
        tiers = nodes.tiers("ab"[rank])
        if rank == 1:
            tiers[1] = disk(FaultyStore(tiers[1].store, hanging))
        if hangs == "list":
            with pytest.raises(CheckpointError, match="There was no progress"):
                recover(needs[rank], tiers, node="ab"[rank], peers=peers)
        return recover(needs[rank], tiers, node="ab"[rank], peers=peers, skip_unreadable=True)

    results = run_ranks(2, look, timeout_s=2.0)
    hanging.let_go.set()
    assert hanging.num_hung
    for rank, recovered in enumerate(results):
        assert_is_state(recovered, needs[rank], 2)
    if hangs == "read":
        assert results[0] is not None
        assert any("made no progress" in text for text in results[0].failures)


@pytest.mark.parametrize("side", ["reads", "writes"])
def test_a_disk_that_hangs_while_copies_travel_costs_that_copy_alone(side: str) -> None:
    """The ranks' own patience is far shorter than storage's; all goes on as before."""
    stores = [MemoryStore() for _ in range(3)]
    verb = {"reads": "read", "writes": "write"}[side]
    # Rank 0's part goes to rank 1, so rank 1 writes a part that isn't its own.
    part = {"reads": "part-00001.weights", "writes": "part-00000.weights"}[side]
    hanging = Hanging(lambda called, name: called == verb and part in name)

    tiers: list[list[Tier]] = [[disk(store)] for store in stores]
    tiers[1] = [disk(FaultyStore(stores[1], hanging))]
    if side == "writes":
        tiers = [[Tier(kind=TierKind.MEMORY, store=MemoryStore()), *own] for own in tiers]
    together = threading.Barrier(3)

    def save(rank: int, writer: CheckpointWriter) -> None:
        saved = writer.save(contents(1, THREE, 3)[rank])
        with pytest.raises(CheckpointError, match=r"Copies: .*made no progress for"):
            saved.wait_until_confirmed(30)
        together.wait(20)
        hanging.hangs = lambda verb, name: False
        hanging.let_go.set()
        together.wait(20)
        writer.save(contents(2, THREE, 3)[rank]).wait_until_confirmed(30)

    write(tiers, save, timeout_s=1.0, replicas=2, stall_s=2.0)
    # Every rank has its own part of the second checkpoint and its neighbour's.
    assert [
        [any(f"part-{part:05d}.json" in name for name in store.files) for part in range(3)]
        for store in stores
    ] == [[True, False, True], [True, True, False], [False, True, True]]


def test_an_upload_that_hangs_on_one_rank_is_given_up_on_all_and_later_ones_are_whole() -> None:
    """What wakes up later finds that it is too late, and no local save has waited for it."""
    cloud = MemoryStore()
    hanging = Hanging(lambda verb, name: verb == "write" and "part-00001.weights" in name)
    tiers = [[disk(MemoryStore()), remote(store)] for store in (cloud, FaultyStore(cloud, hanging))]

    def save(rank: int, writer: CheckpointWriter) -> None:
        saved = [writer.save(contents(step, TWO, 2)[rank]) for step in (1, 2)]
        for item in saved:
            item.wait_until_confirmed(30)
        with pytest.raises(CheckpointError, match=r"Rank 1: storage made no progress for 2 s"):
            saved[0].wait_until_uploaded(30)
        hanging.hangs = lambda verb, name: False
        saved.append(writer.save(contents(3, TWO, 2)[rank]))
        assert [item.wait_until_uploaded(30) for item in saved[1:]] == [False, True]
        hanging.let_go.set()
        join_all("checkpoint-work")

    write(tiers, save, stall_s=2.0)
    assert not any("part-00001.json" in name and "001-0" in name for name in cloud.files)
    needs = [needs_of(rank, TWO, 2) for rank in range(2)]
    results = run_ranks(
        2, lambda rank, peers: recover(needs[rank], [remote(cloud)], node="ab"[rank], peers=peers)
    )
    for rank in range(2):
        assert_is_state(results[rank], needs[rank], 3)
