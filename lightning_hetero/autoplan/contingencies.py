"""Search in advance for the plans that are needed if ranks are lost, so that no rank waits then.

After a loss the first rank that is left plans. So each rank solves the cases in which it would be
the first: rank 0 the loss of any other rank or node, and the next rank, or the first one on the
next node, the loss of rank 0 or of its node. With up to 8 nodes, or ranks, also the loss of any two
at once. A plan made in advance is used only if exactly its task arises: the same devices, model,
sizes and costs.
"""

import pickle
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any, TypeVar

from lightning_hetero.core.process.answering import AnsweringProcess
from lightning_hetero.planner import contingency
from lightning_hetero.planner.contingency import Task
from lightning_hetero.runtime.setup.detect import Seat

__all__ = ["Contingencies", "losses_to_plan_for"]

_T = TypeVar("_T")

_MOST_IN_PAIRS = 8
"""Most ranks, and most nodes, for which the loss of any two of them is planned for."""


def losses_to_plan_for(seats: Sequence[Seat], global_rank: int) -> Iterator[frozenset[int]]:
    """Yield the sets of ranks that may be lost together and leave `global_rank` as the first.

    Args:
        seats: Every rank's device, by global rank.
        global_rank: The rank.
    """
    hosts = sorted({seat.host for seat in seats})
    ranks = [frozenset({rank}) for rank in range(len(seats))]
    nodes = [frozenset(r for r, seat in enumerate(seats) if seat.host == host) for host in hosts]
    together = [*ranks, *(nodes if len(nodes) > 1 else ())]
    for parts in (ranks, nodes):
        if len(parts) <= _MOST_IN_PAIRS:
            together += [one | other for one, other in combinations(parts, 2)]
    for lost in dict.fromkeys(together):
        left = [rank for rank in range(len(seats)) if rank not in lost]
        if left and left[0] == global_rank:
            yield lost


class Contingencies:
    """One rank's solved tasks, and those that it is solving in the background."""

    def __init__(self) -> None:
        self._answers: list[tuple[Task[Any], Any]] = []
        self._solving: tuple[AnsweringProcess, threading.Thread] | None = None

    def prepare(self, tasks: Sequence[Task[object]]) -> None:
        """Begin to solve tasks in the background; earlier ones not solved yet are dropped."""
        self.stop()
        known = [task for task, _ in self._answers]
        new: list[Task[object]] = []
        for task in tasks:
            if task not in known and task not in new:
                new.append(task)
        if new:
            process = AnsweringProcess(contingency.__name__, is_silent=True)
            thread = threading.Thread(
                target=self._solve_all, args=(process, new), name="contingencies", daemon=True
            )
            self._solving = process, thread
            thread.start()

    def solve(self, task: Task[_T]) -> _T:
        """Return the answer to a task; search for it if it isn't known."""
        for known, answer in list(self._answers):
            if known == task:
                found: _T = answer
                return found
        return task.solve()

    def stop(self) -> None:
        """Stop solving; answers that are known are kept."""
        solving, self._solving = self._solving, None
        if solving is not None:
            process, thread = solving
            process.kill()
            thread.join()

    def _solve_all(self, process: AnsweringProcess, tasks: Sequence[Task[object]]) -> None:
        # If the process dies, the other tasks are solved when they are needed.
        with suppress(OSError, EOFError, pickle.UnpicklingError):
            for task in tasks:
                self._answers.append((task, process.ask(task)))
        process.stop()
