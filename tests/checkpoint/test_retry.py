import errno
import threading

import pytest

from lightning_hetero.checkpoint import RetryingStore
from lightning_hetero.core.errors import CheckpointError
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


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_a_store_that_recovers_in_time_loses_nothing(failures: int) -> None:
    inner = MemoryStore()
    flaky = Flaky(failures, ConnectionError("500"))
    store = RetryingStore(FaultyStore(inner, flaky), pause_s=0.0)
    store.write("x", [b"ab", b"c"])
    assert inner.files == {"x": b"abc"}


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "no"),
        PermissionError(13, "no"),
        OSError(errno.ENOSPC, "full"),
        OSError(errno.EROFS, "read-only"),
    ],
)
def test_hopeless_errors_are_raised_at_once(error: Exception) -> None:
    flaky = Flaky(9, error)
    store = RetryingStore(FaultyStore(MemoryStore(), flaky))
    with pytest.raises(type(error)) as raised:
        store.list()
    assert raised.value is error
    assert flaky.left == 8


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
    store = RetryingStore(FaultyStore(inner, hangs), pause_s=0.0, stall_s=0.5)
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
    inner = FaultyStore(MemoryStore(), hangs)
    store = RetryingStore(inner, attempts=2, pause_s=0.0, stall_s=0.05)
    with pytest.raises(CheckpointError, match=r"in 2 attempts.*Nothing has moved"):
        store.read("x")
    hangs.let_go.set()
