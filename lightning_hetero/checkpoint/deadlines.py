"""Threads that end with the process, and waits that last as long as work makes progress.

The standard library's executors are joined when the interpreter exits. But a process that has lost
its peers must exit at once, even in the middle of an upload, so that it can be restarted. And
storage may be slow for hours or hang forever, even in the kernel (a network mount whose server is
gone): only progress distinguishes these.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, ParamSpec, TypeVar

from lightning_hetero.core.process import Deadline, Progress

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Item = TypeVar("_Item")

MARGIN = 1.5
"""A wait for work lasts longer, by this factor, than the work itself may hang. So work that hangs
first raises its own error, which says more.
"""
_MAX_HANGING = 8


class Followed(Generic[_T]):
    """An iterable that ticks a progress with each item; can be iterated several times."""

    def __init__(self, items: Iterable[_T], progress: Progress) -> None:
        self._items = items
        self._progress = progress

    def __iter__(self) -> Iterator[_T]:
        for item in self._items:
            self._progress.refuse_if_late()
            self._progress.tick()
            yield item


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
        # The end mark, put back for the next thread that takes jobs from this queue.
        self._jobs.put(None)


class HangingError(TimeoutError):
    """Too many operations hang already; another one would only add one more hanging thread."""


class Operations:
    """Runs operations that may hang; one without progress is given up and left to its thread.

    A thread that hangs in the kernel can't be ended, and a place may hang for days. To bound the
    number of such threads, no operation begins while 8 earlier ones still hang.
    (Operations that run in parallel by then may hang, too, and exceed that number.)

    Args:
        stall_s: Seconds without progress after which an operation is given up.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._hanging: set[Future[Any]] = set()

    def run(self, operation: Callable[[Progress], _T]) -> _T:
        """Run an operation, which ticks the given progress; return its result.

        May be called from any thread.

        Raises:
            TimeoutError: There has been no progress for too long.
            HangingError: Too many operations hang, so this one hasn't begun.
        """
        if len(self._hanging) >= _MAX_HANGING:
            raise HangingError(f"{len(self._hanging)} operations hang there already.")
        thread = BackgroundThread("checkpoint-store")
        result = thread.submit(operation, thread.progress)
        thread.finish()
        try:
            Deadline(self._stall_s, thread.progress).wait_for(result)
        except TimeoutError:
            # If it wakes up later, its writes must not replace those of a later try.
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
