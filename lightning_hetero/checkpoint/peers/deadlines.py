"""Threads that end with the process, and waits that last as long as work makes progress.

The standard library's executors are joined when the interpreter exits. A process that has lost its
peers must exit at once, even in the middle of an upload, so that it can be restarted. And storage
may be slow for hours or hang for ever, even in the kernel (a network mount whose server is gone):
only progress tells these apart.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import Any, Generic, ParamSpec, TypeVar

__all__ = [
    "MARGIN",
    "BackgroundThread",
    "Deadline",
    "Followed",
    "HangingError",
    "Operations",
    "Progress",
    "map_on_threads",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Item = TypeVar("_Item")

MARGIN = 1.5
"""How much longer whoever waits for work waits than the work may hang: so that it tells itself."""
_MAX_HANGING = 8


class Progress:
    """Counts a thread's progress, for code that waits for it."""

    def __init__(self) -> None:
        self.count = 0
        self.is_given_up = False
        """Whether nobody waits for the work any more."""
        self.part_of: Progress | None = None
        """Larger work, whose progress ticks whenever this one does."""

    def tick(self) -> None:
        """Note some progress."""
        self.count += 1
        if self.part_of is not None:
            self.part_of.tick()

    def give_up(self) -> None:
        """Note that nobody waits for the work any more."""
        self.is_given_up = True

    def refuse_if_late(self) -> None:
        """Raise TimeoutError if nobody waits any more: late work could undo newer work."""
        if self.is_given_up:
            raise TimeoutError("This came too late.")


class Followed(Generic[_T]):
    """An iterable that ticks a progress with each item; may be iterated several times."""

    def __init__(self, items: Iterable[_T], progress: Progress) -> None:
        self._items = items
        self._progress = progress

    def __iter__(self) -> Iterator[_T]:
        for item in self._items:
            self._progress.refuse_if_late()
            self._progress.tick()
            yield item


class Deadline:
    """Is over once there has been no progress for `timeout_s` seconds.

    Args:
        timeout_s: The seconds.
        progress: The progress; without it `renew` tells of it.
    """

    def __init__(self, timeout_s: float, progress: Progress | None = None) -> None:
        self._progress = progress or Progress()
        self._timeout_s = timeout_s
        self._seen = self._progress.count
        self._since_s = time.monotonic()

    def renew(self) -> None:
        """Note some progress."""
        self._progress.tick()

    @property
    def is_over(self) -> bool:
        """Whether there has been no progress for too long, as far as earlier calls have seen."""
        now_s = time.monotonic()
        if self._progress.count != self._seen:
            self._seen, self._since_s = self._progress.count, now_s
        return now_s - self._since_s > self._timeout_s

    def wait_for(self, future: "Future[Any]") -> None:
        """Wait until a job has ended, successfully or not.

        Raises:
            TimeoutError: There has been no progress for too long.
        """
        while not wait([future], timeout=min(1.0, self._timeout_s)).done:
            if self.is_over:
                raise TimeoutError(f"Nothing has moved for {self._timeout_s:g} s.")


class BackgroundThread:
    """Runs jobs one after another on a daemon thread, which never keeps the process alive.

    Args:
        name: Name of the thread.
        count: Number of threads that share the jobs, if their order doesn't matter.
    """

    def __init__(self, name: str, count: int = 1) -> None:
        self.progress = Progress()
        """The jobs' progress; it also ticks when a job ends."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, job: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> "Future[_T]":
        """Queue a job; return its future, by which it can be cancelled before it starts."""
        future: Future[_T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(job(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)
            self.progress.tick()

        self._jobs.put(run)
        return future

    def finish(self) -> None:
        """End the threads once all jobs are done; doesn't wait."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        # For the next thread that shares the jobs.
        self._jobs.put(None)


class HangingError(TimeoutError):
    """Too many operations hang already; another one would only add one more hanging thread."""


class Operations:
    """Runs operations that may hang; one without progress is given up and left to its thread.

    A thread that hangs in the kernel can't be ended. So that a place that hangs for days doesn't
    collect threads, no operation begins while `max_hanging` operations have been given up and still
    hang. (More may hang if they were running in parallel by then.)

    Args:
        stall_s: Seconds without progress after which an operation is given up.
        max_hanging: Operations that may be given up at a time.
    """

    def __init__(self, stall_s: float, *, max_hanging: int = _MAX_HANGING) -> None:
        self._stall_s = stall_s
        self._max_hanging = max_hanging
        self._hanging: set[Future[Any]] = set()

    def run(self, operation: Callable[[Progress], _T]) -> _T:
        """Run an operation, which ticks the given progress; return its result. For any thread.

        Raises:
            TimeoutError: There has been no progress for too long.
            HangingError: Too many operations hang, so this one hasn't begun.
        """
        if len(self._hanging) >= self._max_hanging:
            raise HangingError(f"{len(self._hanging)} operations hang there already.")
        thread = BackgroundThread("checkpoint-store")
        result = thread.submit(operation, thread.progress)
        thread.finish()
        try:
            Deadline(self._stall_s, thread.progress).wait_for(result)
        except TimeoutError:
            # Its late writes must not replace those of a later try.
            thread.progress.give_up()
            self._hanging.add(result)
            result.add_done_callback(self._hanging.discard)
            raise
        return result.result()


def map_on_threads(
    job: Callable[[_Item], _T], items: Iterable[_Item], *, count: int, progress: Progress
) -> list[_T]:
    """Return the result of a job for each item, in order; items are processed in parallel.

    Args:
        job: Called on daemon threads; must end by itself sooner or later.
        items: The items.
        count: Number of threads.
        progress: Ticks with every finished item.
    """
    threads = BackgroundThread("checkpoint-map", count)
    futures = [threads.submit(job, item) for item in items]
    threads.finish()
    try:
        results = []
        for future in futures:
            results.append(future.result())
            progress.tick()
        return results
    finally:
        for future in futures:
            future.cancel()
