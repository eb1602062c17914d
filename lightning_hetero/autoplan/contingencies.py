"""Have at hand what will have to be planned if ranks are lost, so that nobody waits for a solver.

Each rank solves what it would be asked for: of those who are left the first one plans. That is the
loss of any other rank, or of all of another node, on rank 0; and the loss of rank 0, or of its
node, on whoever is first then. With up to 8 nodes, or ranks, it is also the loss of any two at
once. A plan made ahead is taken only if exactly its question is asked: the same devices, model,
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
"""Ranks, and nodes, up to which the loss of any two of them is planned for."""


def losses_to_plan_for(seats: Sequence[Seat], global_rank: int) -> Iterator[frozenset[int]]:
    """Yield the ranks that may be lost together and after which a rank is the first one left.

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
    """One rank's answers to what may be asked next."""

    def __init__(self) -> None:
        self._answers: list[tuple[Task[Any], Any]] = []
        self._solving: tuple[AnsweringProcess, threading.Thread] | None = None

    def prepare(self, tasks: Sequence[Task[object]]) -> None:
        """Begin to solve tasks beside the training; others that are still to be solved, aren't."""
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
        """Return the answer to a task: the one that is known, else after a search."""
        for known, answer in list(self._answers):
            if known == task:
                found: _T = answer
                return found
        return task.solve()

    def stop(self) -> None:
        """Solve nothing more; what is solved stays known."""
        solving, self._solving = self._solving, None
        if solving is not None:
            process, thread = solving
            process.kill()
            thread.join()

    def _solve_all(self, process: AnsweringProcess, tasks: Sequence[Task[object]]) -> None:
        # A process that dies has solved less: the rest is solved when it is asked for.
        with suppress(OSError, EOFError, pickle.UnpicklingError):
            for task in tasks:
                self._answers.append((task, process.ask(task)))
        process.stop()
