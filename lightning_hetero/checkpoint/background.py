"""Threads that work through jobs in order, and waits that last as long as the work moves.

Executors of the standard library are joined when the interpreter exits. A process that has lost its
peers must exit at once, in the middle of an upload if need be, so that it can be started anew. And
storage may be slow for hours or hang for ever: what tells them apart is whether anything moves.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import Any, Generic, ParamSpec, TypeVar

__all__ = ["BackgroundThread", "Followed", "Patience", "Progress"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

_LONGEST_LOOK_S = 1.0


class Progress:
    """Counts what a thread gets done, for whoever waits for it."""

    def __init__(self) -> None:
        self.count = 0
        self.is_given_up = False
        """Whether nobody waits any more."""

    def tick(self) -> None:
        """Something moved."""
        self.count += 1


class Followed(Generic[_T]):
    """Items that tell of each one that is taken; they may be iterated again."""

    def __init__(self, items: Iterable[_T], progress: Progress) -> None:
        self._items = items
        self._progress = progress

    def __iter__(self) -> Iterator[_T]:
        for item in self._items:
            if self._progress.is_given_up:
                raise TimeoutError("This came too late.")
            self._progress.tick()
            yield item


class Patience:
    """Ends once nothing has moved for `stall_s` seconds."""

    def __init__(self, progress: Progress, stall_s: float) -> None:
        self._progress = progress
        self._stall_s = stall_s
        self._seen = progress.count
        self._since_s = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether nothing has moved for too long, as far as earlier looks tell."""
        now_s = time.monotonic()
        if self._progress.count != self._seen:
            self._seen, self._since_s = self._progress.count, now_s
        return now_s - self._since_s > self._stall_s

    def wait_for(self, future: "Future[Any]") -> None:
        """Return when a job has ended, whatever it came to.

        Raises:
            TimeoutError: Nothing has moved for too long.
        """
        while not wait([future], timeout=min(_LONGEST_LOOK_S, self._stall_s)).done:
            if self.is_over:
                raise TimeoutError(f"Nothing has moved for {self._stall_s:g} s.")


class BackgroundThread:
    """Runs one job after the other; ends with the process, whatever it is doing then."""

    def __init__(self, name: str) -> None:
        self.progress = Progress()
        """What the jobs get done; each job that ends counts."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> "Future[_T]":
        """Run a job behind those that wait already."""
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(job(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)
            self.progress.tick()

        self._jobs.put(run)
        return future

    def finish(self) -> None:
        """End the thread once all jobs are done; doesn't wait for it."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
