"""Two detectors in one process: what a rank does when another one has failed."""

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.core.errors import PeerError
from lightning_hetero.runtime.ranks import failure
from lightning_hetero.runtime.ranks.connections import is_broken_connection
from lightning_hetero.runtime.ranks.failure import FailureDetector
from lightning_hetero.runtime.ranks.heartbeat import Heartbeat, Ring
from tests.fits import Case, fit
from tests.plans import pipeline, plan_of, stage
from tests.processes import ProcessPool

PATIENCE_S = 60.0


class Watched:
    """A rank's detector, and what it did."""

    def __init__(
        self, store: dist.Store, rank: int, timeout_s: float = 1.0, patience_s: float = 10.0
    ) -> None:
        ring = Ring(numbers=(0, 1), rank=rank, patience_s=patience_s, find_gone=lambda: None)
        self.heartbeat = Heartbeat(store, number=rank, interval_s=0.1)
        seconds = {"timeout": timedelta(seconds=timeout_s), "silence": timedelta(seconds=1)}
        self.detector = FailureDetector(self.heartbeat, ring, abort=lambda: self.abort(), **seconds)
        self.has_aborted, self.was_ended = threading.Event(), threading.Event()
        self.abort: Any = self.has_aborted.set
        self.detector.start()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Watched, Watched]]:
    store = dist.HashStore()
    both = Watched(store, 0), Watched(store, 1)
    monkeypatch.setattr(failure, "end_process", lambda rank, _: both[rank].was_ended.set())
    yield both
    for watched in both:
        watched.detector.stop()


def test_a_failure_aborts_the_communicators_and_a_teardown_that_hangs_is_ended(
    ranks: tuple[Watched, Watched],
) -> None:
    failed, other = ranks
    failed.detector.report(ValueError("a bug"))
    assert other.has_aborted.wait(PATIENCE_S)
    told = pytest.raises(PeerError, match="Rank 0 failed: ValueError: a bug")
    with told, other.detector.watching():
        raise RuntimeError("NCCL communicator was aborted")
    # Nobody says that the teardown is done.
    assert other.was_ended.wait(PATIENCE_S)


@pytest.mark.parametrize(("patience_s", "is_ended"), [(PATIENCE_S, False), (0.1, True)])
def test_in_place_a_rank_may_work_as_long_as_the_others_wait_for_it(
    patience_s: float, monkeypatch: pytest.MonkeyPatch, *, is_ended: bool
) -> None:
    store, ended = dist.HashStore(), threading.Event()
    monkeypatch.setattr(failure, "end_process", lambda *_: ended.set())
    failed, busy = (Watched(store, rank, 1000.0, patience_s) for rank in range(2))
    try:
        failed.detector.report(ValueError("a bug"))
        # Its main thread sees nothing of it.
        assert busy.has_aborted.wait(PATIENCE_S)
        assert ended.wait(PATIENCE_S if is_ended else 1.0) == is_ended
    finally:
        for watched in (failed, busy):
            watched.detector.stop()


def test_a_rank_that_says_goodbye_is_missed_by_nobody(ranks: tuple[Watched, Watched]) -> None:
    gone, left = ranks
    gone.detector.stop()
    assert not left.was_ended.wait(3.0)
    left.detector.stop()
    # A later run of the same processes is watched again.
    left.detector.start()
    assert left.was_ended.wait(PATIENCE_S)


def test_rank_0_may_leave_first_and_take_the_store_with_it(
    ranks: tuple[Watched, Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, left = ranks

    def gone(*_: object) -> None:
        raise RuntimeError("the server has gone")

    first.detector.stop()
    assert left.detector._watch.has_server_left
    thread = left.heartbeat._thread
    monkeypatch.setattr(left.heartbeat, "_round", gone)
    thread.join(PATIENCE_S)
    assert left.heartbeat.is_store_gone
    assert not left.was_ended.wait(3.0)


def test_a_process_that_only_beats_judges_nobody(ranks: tuple[Watched, Watched]) -> None:
    """As between two generations; what it is told is there once it judges again."""
    first, second = ranks
    first.detector.pause()
    second.detector.report(ValueError("a bug"))
    assert not first.has_aborted.wait(1.0)
    first.detector.start()
    assert first.has_aborted.wait(PATIENCE_S)
    assert "a bug" in first.detector.explain()


def test_what_nccl_could_not_allocate_here_is_no_failure_of_a_peer():
    told = "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error: Cuda failure 2 'out of memory'"
    for error in (dist.DistBackendError(told), torch.OutOfMemoryError("NCCL: out of memory")):
        assert not is_broken_connection(error)
    assert is_broken_connection(dist.DistBackendError("NCCL error: remote process exited"))


def test_whoever_stops_waits_for_what_is_aborted(ranks: tuple[Watched, Watched]) -> None:
    """Or the interpreter would end under a thread that is in C++, and the process abort."""
    failed, left = ranks
    begun, goes_on, order = threading.Event(), threading.Event(), []

    def abort() -> None:
        begun.set()
        goes_on.wait(PATIENCE_S)
        order.append("aborted")

    left.abort = abort
    failed.detector.report(ValueError("a bug"))
    assert begun.wait(PATIENCE_S)
    stopping = threading.Thread(target=lambda: (left.detector.stop(), order.append("stopped")))
    stopping.start()
    goes_on.set()
    stopping.join(PATIENCE_S)
    assert order == ["aborted", "stopped"]


def num_gloo_threads(_: int) -> int:
    """Return how many there are; they end shortly after their groups."""
    deadline_s = time.monotonic() + 20.0
    while time.monotonic() < deadline_s:
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        count = sum(name.startswith("gloo_tcp") for name in names)
        if count == 0:
            break
        time.sleep(0.05)
    return count


@pytest.mark.dist
def test_no_thread_of_a_runs_groups_outlives_it() -> None:
    # Of processes of their own: what other tests have mocked may hold groups.
    pool = ProcessPool()
    case = Case(plan=plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 3))), world_size=2)
    pool.run(fit, 2, case)
    assert pool.run(num_gloo_threads, 2) == [0, 0]
    pool.close()
