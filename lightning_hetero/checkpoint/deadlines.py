"""Work on threads that end with the process, and waits that last as long as the work moves.

Executors of the standard library are joined when the interpreter exits. A process that has lost its
peers must exit at once, in the middle of an upload if need be, so that it can be started anew. And
storage may be slow for hours or hang for ever, even in the kernel (a network mount whose server is
gone): what tells them apart is whether anything moves.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import Any, Generic, ParamSpec, TypeVar

__all__ = [
    "BackgroundThread",
    "Deadline",
    "Followed",
    "HangingError",
    "Patience",
    "Progress",
    "map_on_threads",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Item = TypeVar("_Item")

_LONGEST_LOOK_S = 1.0
_MAX_HANGING = 8


class Progress:
    """Counts what a thread gets done, for whoever waits for it."""

    def __init__(self) -> None:
        self.count = 0
        self.is_given_up = False
        """Whether nobody waits any more."""
        self.part_of: Progress | None = None
        """Work that moves whenever this does."""

    def tick(self) -> None:
        """Something moved."""
        self.count += 1
        if self.part_of is not None:
            self.part_of.tick()

    def refuse_if_late(self) -> None:
        """Raise TimeoutError if nobody waits any more: what is done now could undo newer things."""
        if self.is_given_up:
            raise TimeoutError("This came too late.")


class Followed(Generic[_T]):
    """Items that tell of each one that is taken; they may be iterated again."""

    def __init__(self, items: Iterable[_T], progress: Progress) -> None:
        self._items = items
        self._progress = progress

    def __iter__(self) -> Iterator[_T]:
        for item in self._items:
            self._progress.refuse_if_late()
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
    """Runs one job after the other; ends with the process, whatever it is doing then.

    Args:
        name: Of the thread.
        count: Threads that share the jobs, where their order doesn't matter.
    """

    def __init__(self, name: str, count: int = 1) -> None:
        self.progress = Progress()
        """Counts what the jobs get done; each job that ends counts."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, job: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> "Future[_T]":
        """Run a job after those that wait already, unless it is cancelled before its turn."""
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
        """End the threads once all jobs are done; doesn't wait for it."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        # For the next thread that shares the jobs.
        self._jobs.put(None)


class HangingError(TimeoutError):
    """Too many operations hang already; another one would only add a thread that does."""


class Deadline:
    """Runs operations that may hang; those in which nothing moves are left to their threads.

    A thread that hangs in the kernel can't be ended. So that a place that hangs for days doesn't
    collect threads, no operation begins while as many as `max_hanging` have been given up and still
    hang. (Those that were under way side by side by then may be given up besides.)

    Args:
        stall_s: Seconds without progress after which an operation is given up.
        max_hanging: Operations that may be given up at a time.
    """

    def __init__(self, stall_s: float, *, max_hanging: int = _MAX_HANGING) -> None:
        self._stall_s = stall_s
        self._max_hanging = max_hanging
        self._hanging: set[Future[Any]] = set()

    def run(self, operation: Callable[[Progress], _T]) -> _T:
        """Return what an operation returns, which tells its progress; called from any thread.

        Raises:
            TimeoutError: Nothing has moved for too long.
            HangingError: Too many operations hang, so this one hasn't begun.
        """
        if len(self._hanging) >= self._max_hanging:
            raise HangingError(f"{len(self._hanging)} operations hang there already.")
        thread = BackgroundThread("checkpoint-store")
        result = thread.submit(operation, thread.progress)
        thread.finish()
        try:
            Patience(thread.progress, self._stall_s).wait_for(result)
        except TimeoutError:
            # What it still writes must not replace what a later try does.
            thread.progress.is_given_up = True
            self._hanging.add(result)
            result.add_done_callback(self._hanging.discard)
            raise
        return result.result()


def map_on_threads(
    job: Callable[[_Item], _T], items: Iterable[_Item], *, count: int, progress: Progress
) -> list[_T]:
    """Return what a job makes of each item, in order, worked on side by side.

    Args:
        job: Ends sooner or later by itself; called on daemon threads.
        items: What to work on.
        count: Threads.
        progress: Is told of every item that is done.
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
