"""One living job writes to a place; who is gone holds nobody up, whatever the clocks say."""

import json
import threading
from typing import Any

import pytest

from lightning_hetero.checkpoint.claims import OWNER_FILE, Lease, OccupiedError
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.process import machine_namespace
from tests.checkpoint.stand_ins import FaultyStore, MemoryStore

FOREVER_S = 10_000.0
"""A test that waits for a sign of life would run into its timeout."""

JOB = ["job-7", "node-0", "29400", ""]


def start_job(monkeypatch: pytest.MonkeyPatch, run_id: str, host: str, port: str) -> None:
    """Look like a process that torchrun has started."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", port)


def left_by(store: MemoryStore, **changes: Any) -> None:
    """Leave the file of an owner on another machine, whose clock is years ahead."""
    lease = Lease(store, shared=False)
    lease.take()
    owner = json.loads(store.files[OWNER_FILE])
    owner |= {"session": "another", "machine": "another", "at": "2099-01-01T00:00:00+00:00"}
    store.files[OWNER_FILE] = json.dumps(owner | changes).encode()


def owner_of(store: MemoryStore) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(store.files[OWNER_FILE])
    return found


@pytest.mark.parametrize(
    ("shared", "changes", "beat_s"),
    [
        (True, {"machine": machine_namespace(), "process": [1, -1]}, FOREVER_S),
        (True, {"machine": machine_namespace(), "process": None}, FOREVER_S),
        (True, {"job": JOB}, FOREVER_S),  # An earlier start of the torchrun job.
        (False, {}, FOREVER_S),  # On a disk of a machine that was started again.
        (True, {}, 0.01),  # Elsewhere, without a sign of life.
    ],
)
def test_an_owner_that_is_gone_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, *, shared: bool, changes: dict[str, Any], beat_s: float
) -> None:
    start_job(monkeypatch, *JOB[:3])
    store = MemoryStore()
    left_by(store, **{"job": None, **changes})
    lease = Lease(store, shared=shared, beat_s=beat_s)
    lease.take()
    assert owner_of(store)["session"] != "another"
    lease.release()
    assert not store.files


@pytest.mark.parametrize(
    ("job", "owner"),
    [
        pytest.param(("", "node-0", "29400"), None, id="no torchrun"),
        pytest.param(("none", "node-0", "29400"), None, id="torchrun without a name"),
        pytest.param(("job-7", "node-5", "29400"), JOB, id="one name, another store"),
        pytest.param(("job-7", "node-0", "29401"), JOB, id="one name, another port"),
        pytest.param(
            ("job-7", "localhost", "29400"),
            ["job-7", "localhost", "29400", "another machine"],
            id="one name, each machine's own store",
        ),
    ],
)
def test_an_owner_elsewhere_that_lives_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, job: tuple[str, str, str], owner: list[str] | None
) -> None:
    start_job(monkeypatch, *job)
    store = MemoryStore()
    left_by(store, job=owner)
    beats = 0

    def beat(verb: str, name: str) -> None:
        nonlocal beats
        if verb == "read":
            beats += 1
            store.files[OWNER_FILE] = json.dumps(owner_of(store) | {"beats": beats}).encode()

    lease = Lease(FaultyStore(store, beat), shared=True, beat_s=0.01)
    with pytest.raises(OccupiedError, match="Another job writes its checkpoints"):
        lease.take()
    lease.release()
    assert owner_of(store)["session"] == "another"


def test_an_owner_learns_that_another_job_has_taken_its_place() -> None:
    store = MemoryStore()
    lease = Lease(store, shared=True, beat_s=0.01)
    lease.take()
    lease.raise_if_lost()
    for _ in range(200):
        # Again where the owner wrote in the same moment.
        left_by(store, host="thief")
        lease._thread.join(0.05)
        if not lease._thread.is_alive():
            break
    with pytest.raises(OccupiedError, match="thief"):
        lease.raise_if_lost()
    lease.release()
    assert owner_of(store)["host"] == "thief"


def test_a_place_that_does_not_answer_is_tried_again_and_holds_nobody_up() -> None:
    store, is_down = MemoryStore(), threading.Event()
    is_down.set()

    def down(verb: str, name: str) -> None:
        if is_down.is_set():
            raise CheckpointError("answered 500")

    lease = Lease(FaultyStore(store, down), shared=True, beat_s=0.01)
    lease.take()
    lease.raise_if_lost()
    is_down.clear()
    for _ in range(1000):
        if store.files:
            break
        threading.Event().wait(0.01)
    assert store.files
    lease.release()


def test_an_earlier_generation_of_the_run_is_no_other_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that was cut short may still write once more, after the next one has taken the place."""
    monkeypatch.setenv("LIGHTNING_HETERO_MEMBERSHIP", "members/7")
    store = MemoryStore()
    lease = Lease(store, shared=True, beat_s=0.01)
    lease.take()
    left_by(store)
    for _ in range(1000):
        if owner_of(store)["session"] != "another":
            break
        threading.Event().wait(0.01)
    lease.raise_if_lost()
    assert lease._thread.is_alive()
    lease.release()
