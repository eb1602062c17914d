import errno
import random
import threading

import pytest
from botocore.exceptions import NoCredentialsError

from lightning_hetero.checkpoint import RetryingStore, RetryPolicy
from lightning_hetero.core.errors import CheckpointError, ConfigurationError
from tests.checkpoint.stand_ins import FaultyStore, MemoryStore


class Flaky:
    """Fails a number of times with one error."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.left = failures
        self.error = error

    def __call__(self, verb: str, name: str) -> None:
        if self.left:
            self.left -= 1
            raise self.error


@pytest.mark.parametrize("failures", [0, 1, 4])
def test_a_store_that_recovers_in_time_loses_nothing(failures: int) -> None:
    inner = MemoryStore()
    pauses: list[float] = []
    flaky = Flaky(failures, ConnectionError("500"))
    store = RetryingStore(FaultyStore(inner, flaky), RetryPolicy(), sleep=pauses.append)
    store.write("x", [b"ab", b"c"])
    assert inner.files == {"x": b"abc"}
    assert len(pauses) == failures


def test_pauses_grow_and_are_bounded() -> None:
    pauses: list[float] = []
    policy = RetryPolicy(attempts=10, first_pause_s=1.0, longest_pause_s=8.0)
    store = RetryingStore(
        FaultyStore(MemoryStore(), Flaky(99, TimeoutError("slow"))), policy, sleep=pauses.append
    )
    with pytest.raises(CheckpointError, match="in 10 attempts"):
        store.read("x")
    for index, pause in enumerate(pauses):
        middle = min(8.0, 2.0**index)
        assert 0.5 * middle <= pause <= 1.5 * middle


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "no"),
        PermissionError(13, "no"),
        OSError(errno.ENOSPC, "full"),
        OSError(errno.EROFS, "read-only"),
        NoCredentialsError(),
    ],
)
def test_hopeless_errors_are_raised_at_once(error: Exception) -> None:
    pauses: list[float] = []
    store = RetryingStore(
        FaultyStore(MemoryStore(), Flaky(9, error)), RetryPolicy(), sleep=pauses.append
    )
    with pytest.raises(type(error)) as raised:
        store.list()
    assert raised.value is error
    assert pauses == []


def test_a_policy_without_attempts_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="attempts"):
        RetryPolicy(attempts=0)


class Hangs:
    """Doesn't answer the first time, until it is let go."""

    def __init__(self, at: str) -> None:
        self.at = at
        self.left = 1
        self.let_go = threading.Event()

    def __call__(self, verb: str, name: str) -> None:
        if verb == self.at and self.left:
            self.left -= 1
            assert self.let_go.wait(20)


@pytest.mark.parametrize("verb", ["write", "read", "list", "remove"])
def test_a_try_that_hangs_is_given_up_and_comes_too_late(verb: str) -> None:
    inner, hangs = MemoryStore(), Hangs(verb)
    inner.write("x", [b"old"])
    policy = RetryPolicy(attempts=2, first_pause_s=0.0, stall_s=0.5)
    store = RetryingStore(FaultyStore(inner, hangs), policy)
    if verb == "write":
        store.write("x", [b"ne", b"w"])
    elif verb == "read":
        assert store.read("x") == b"old"
    elif verb == "list":
        assert store.list() == {"x": 3}
    else:
        store.remove(["x"])
    hangs.let_go.set()
    for thread in threading.enumerate():
        if thread.name == "checkpoint-store":
            thread.join(20)
    assert inner.files == {"write": {"x": b"new"}, "remove": {}}.get(verb, {"x": b"old"})


def test_what_never_answers_is_an_error_in_the_end() -> None:
    hangs = Hangs("read")
    hangs.left = 2
    policy = RetryPolicy(attempts=2, first_pause_s=0.0, stall_s=0.05)
    store = RetryingStore(FaultyStore(MemoryStore(), hangs), policy)
    with pytest.raises(CheckpointError, match=r"in 2 attempts.*Nothing has moved"):
        store.read("x")
    hangs.let_go.set()


def test_pauses_leave_the_users_random_numbers_alone() -> None:
    """A thread that waits for a store must not change which samples a seeded run draws."""
    before = random.getstate()
    assert RetryPolicy().pause_s(1) != RetryPolicy().pause_s(1)
    assert random.getstate() == before
