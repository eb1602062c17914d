"""What benchmarks of whole runs share: processes, a step's times, ways that take turns."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, TypeVar

import lightning as L

from tests.processes import ProcessPool

Seconds = tuple[float, float]
"""Wall time, and CPU time of the main thread."""
_Found = TypeVar("_Found")


class StepTimes(L.Callback):
    """Times each training step from its batch's start to its end, data loading apart.

    Args:
        warm_up: Number of first steps to leave out.
    """

    def __init__(self, warm_up: int = 2) -> None:
        self._warm_up = warm_up
        self._steps: list[Seconds] = []

    @property
    def steps(self) -> list[Seconds]:
        """Times of the steps."""
        return self._steps[self._warm_up :]

    @property
    def seconds(self) -> list[float]:
        """Wall times of the steps."""
        return [wall_s for wall_s, _ in self.steps]

    def start(self) -> None:
        """Begin a step."""
        self._start = time.perf_counter(), time.thread_time()

    def stop(self) -> None:
        """End a step."""
        wall_s, cpu_s = self._start
        self._steps.append((time.perf_counter() - wall_s, time.thread_time() - cpu_s))

    def on_train_batch_start(self, *_: Any) -> None:
        self.start()

    def on_train_batch_end(self, *_: Any) -> None:
        self.stop()


@contextmanager
def processes() -> Iterator[ProcessPool]:
    """Give processes for runs; they end with the block."""
    with closing(ProcessPool()) as pool:
        yield pool


def in_turns(ways: Mapping[str, Callable[[], _Found]], repeats: int) -> dict[str, list[_Found]]:
    """Return what each way gives, one after another in each repeat: a machine's speed changes."""
    found: dict[str, list[_Found]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            found[name].append(way())
    return found
