"""Plan iterations in the background: a process that assigns and a thread that talks to it.

Planning in a thread would take Python's lock from the one that launches the training's kernels. A
process doesn't, and it may die without harm. It imports neither torch nor Lightning, so it starts
quickly and is small.
"""

import os
import pickle
import queue
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

from lightning_hetero.assign.requests import AssignmentRequest, plan_text
from lightning_hetero.data.assignment_store import AssignmentStore

__all__ = ["PlanningProcess", "Producer"]

_PROGRAM = (
    "import sys; sys.path.insert(0, {root!r}); "
    "from lightning_hetero.assign.requests import serve; serve()"
)


class PlanningProcess:
    """A process that assigns."""

    def __init__(self) -> None:
        self._process = self._start()

    @property
    def pid(self) -> int:
        """The process that runs."""
        return self._process.pid

    def plan(self, request: AssignmentRequest) -> str:
        """Return what `plan_text` does; OSError or EOFError if the process has died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        text: str = pickle.load(self._process.stdout)
        return text

    def restart(self) -> None:
        """Put a new process in its place."""
        self.stop()
        self._process = self._start()

    def kill(self) -> None:
        """End the process; any thread may, also while another waits for an answer."""
        self._process.kill()

    def stop(self) -> None:
        """End the process and close its pipes."""
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # A request that the process didn't live to read.

    @staticmethod
    def _start() -> subprocess.Popen[bytes]:
        root = str(Path(__file__).parents[2])
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(root=root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            # A Ctrl-C is for the trainer, who may still want to save; see `serve` for the end.
            start_new_session=True,
        )


class Producer:
    """Plans what it is asked for, in order, and publishes it.

    A process that dies costs the time of planning here instead.
    """

    def __init__(self, store: AssignmentStore, process: PlanningProcess | None = None) -> None:
        self._store = store
        self._process = process or PlanningProcess()
        self._requests: queue.SimpleQueue[tuple[str, AssignmentRequest] | None]
        self._requests = queue.SimpleQueue()
        self._wanted: set[str] = set()
        self._publishing = threading.Lock()
        self.complaints: deque[str] = deque()
        """What went wrong, for the main thread to warn of."""
        self._thread = threading.Thread(target=self._run, name="assignments", daemon=True)
        self._thread.start()

    def request(self, key: str, request: AssignmentRequest) -> None:
        """Plan an iteration and publish it under a key."""
        self._wanted.add(key)
        self._requests.put((key, request))

    def withdraw(self, key: str) -> None:
        """Publish a key no more, now that it is or needn't be: it may soon be deleted."""
        with self._publishing:
            self._wanted.discard(key)

    def close(self) -> None:
        """End thread and process."""
        self._wanted.clear()
        self._requests.put(None)
        self._process.kill()
        self._thread.join()
        self._process.stop()

    def _run(self) -> None:
        while (item := self._requests.get()) is not None:
            key, request = item
            if key not in self._wanted:
                continue
            text = self._plan(request)
            try:
                with self._publishing:
                    if key in self._wanted:
                        self._store.publish(key, text)
            except RuntimeError as error:
                # The store's server has gone, and the run with it.
                self.complaints.append(f"A producer can't reach the store: {error}")
                return

    def _plan(self, request: AssignmentRequest) -> str:
        try:
            return self._process.plan(request)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self._process.restart()
            self.complaints.append(
                f"The planning process has died ({type(error).__name__}); this iteration is "
                "planned in the trainer's own process, the next one in a new one."
            )
            return plan_text(request)
