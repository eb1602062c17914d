"""Places of checkpoints are entered behind the training, and left whenever a fit ends."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_hetero.callbacks.checkpointing import access
from lightning_hetero.callbacks.checkpointing.access import Access
from lightning_hetero.checkpoint import CheckpointId, Peers, WriterOptions
from lightning_hetero.core.errors import CheckpointError

PATIENCE_S = 60.0


class Lease:
    def __init__(self) -> None:
        self.is_lost, self.released = False, threading.Event()
        self.release = self.released.set

    def raise_if_lost(self) -> None:
        if self.is_lost:
            raise CheckpointError("another job")


class Writer:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.left, self.closed = threading.Event(), False
        self.leave = self.left.set

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give a lease and what ranks wait for before they have entered."""
    found = SimpleNamespace(lease=Lease(), come=threading.Event(), error=None, forgotten=[])

    def join(*_: Any, **__: Any) -> Any:
        assert found.come.wait(PATIENCE_S)
        return SimpleNamespace(leases=(found.lease,), node_of_rank=("a",), tiers=[], node="a")

    def begin_run(*_: Any, recovered: Any, **__: Any) -> CheckpointId:
        if found.error:
            raise found.error
        return CheckpointId(0, recovered.report.attempt, recovered.id.run)

    for name, stand_in in (("join", join), ("begin_run", begin_run), ("CheckpointWriter", Writer)):
        monkeypatch.setattr(access, name, stand_in)
    places: Any = SimpleNamespace(forget_other_runs=found.forgotten.append)
    found.access = Access(
        places,
        Peers(),
        is_first_of_node=True,
        options=WriterOptions(),
        skip_unreadable=False,
    )
    found.recovered = SimpleNamespace(
        id=CheckpointId(7, 2, "run"), report=SimpleNamespace(attempt=3)
    )
    return found


def test_a_save_waits_until_the_places_are_entered(entry: Any) -> None:
    assert entry.access.enter_later(entry.recovered) == CheckpointId(0, 3, "run")
    asked: list[Any] = []
    saving = threading.Thread(target=lambda: asked.append(entry.access.writer))
    saving.start()
    assert asked == []
    entry.come.set()
    saving.join(PATIENCE_S)
    assert isinstance(asked[0], Writer)
    assert (entry.access.node_of_rank, entry.forgotten) == (("a",), ["run"])
    entry.access.leave()
    assert asked[0].left.is_set()
    assert entry.lease.released.is_set()


def test_what_is_entered_after_a_fit_has_ended_is_left_at_once(entry: Any) -> None:
    """Else the run's own lease would keep its next generation, or its restart, out."""
    entry.access.enter_later(entry.recovered)
    entry.access.begin()
    entry.access.leave()
    assert not entry.lease.released.is_set()
    entry.come.set()
    assert entry.lease.released.wait(PATIENCE_S)


def test_nothing_is_entered_before_a_step_is_trained(entry: Any) -> None:
    entry.come.set()
    entry.access.enter_later(entry.recovered)
    entry.access.leave()
    entry.access.begin()
    assert not entry.lease.released.is_set()
    assert entry.forgotten == []


def test_what_went_wrong_behind_the_training_is_raised_by_the_next_save(entry: Any) -> None:
    entry.error = CheckpointError("full")
    entry.come.set()
    entry.access.enter_later(entry.recovered)
    with pytest.raises(CheckpointError, match="full"):
        entry.access.writer.save()
    assert entry.lease.released.is_set()
    entry.access.leave()


def test_a_writer_that_is_closed_is_not_left_again_and_a_lost_lease_is_told(entry: Any) -> None:
    entry.come.set()
    entry.access.take_leases()
    entry.access.enter(entry.recovered)
    writer = entry.access.writer
    entry.access.close()
    assert writer.closed
    entry.lease.is_lost = True
    with pytest.raises(CheckpointError, match="another job"):
        _ = entry.access.writer
    entry.access.leave()
    assert not writer.left.is_set()
    assert entry.lease.released.is_set()
