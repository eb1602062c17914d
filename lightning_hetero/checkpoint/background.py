"""A thread that works through jobs in order and never keeps a process from ending.

Executors of the standard library are joined when the interpreter exits. A process that has lost its
peers must exit at once, in the middle of an upload if need be, so that it can be started anew.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

__all__ = ["BackgroundThread"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class BackgroundThread:
    """Runs one job after the other; ends with the process, whatever it is doing then."""

    def __init__(self, name: str) -> None:
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

        self._jobs.put(run)
        return future

    def finish(self) -> None:
        """Wait until all jobs are done, then end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
