"""Have at hand what will have to be planned if ranks are lost, so that nobody waits for a solver.

Each rank solves what it would be asked for: of those who are left the first one plans. That is the
loss of any other rank, or of all of another node, on rank 0; and the loss of rank 0, or of its
node, on whoever is first then. What was foreseen is taken only if it is just what is asked: the
same devices, model, sizes and costs.
"""

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from lightning_hetero.core.errors import PlanningError
from lightning_hetero.planner import PlanningResult
from lightning_hetero.planner.contingency import PlanningTask
from lightning_hetero.runtime.setup.detect import Seat

__all__ = ["Contingencies", "losses_to_plan_for"]

_PROGRAM = (
    "import sys; sys.path.insert(0, {root!r}); "
    "from lightning_hetero.planner.contingency import serve; serve()"
)


def losses_to_plan_for(seats: Sequence[Seat], global_rank: int) -> Iterator[frozenset[int]]:
    """Yield the ranks that may be lost together and after which a rank is the first one left.

    Args:
        seats: Every rank's device, by global rank.
        global_rank: The rank.
    """
    hosts = {seat.host for seat in seats}
    together = [frozenset({rank}) for rank in range(len(seats))]
    for host in sorted(hosts) if len(hosts) > 1 else ():
        together.append(frozenset(r for r, seat in enumerate(seats) if seat.host == host))
    for lost in dict.fromkeys(together):
        left = [rank for rank in range(len(seats)) if rank not in lost]
        if left and left[0] == global_rank:
            yield lost


class Contingencies:
    """One rank's answers to what may be asked next."""

    def __init__(self) -> None:
        self._answers: list[tuple[PlanningTask, PlanningResult | PlanningError]] = []
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self, tasks: Sequence[PlanningTask]) -> None:
        """Begin to solve tasks behind the training; others that are still to be solved, aren't."""
        self.stop()
        known = [task for task, _ in self._answers]
        new: list[PlanningTask] = []
        for task in tasks:
            if task not in known and task not in new:
                new.append(task)
        if new:
            root = str(Path(__file__).parents[2])
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(root=root)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                # A Ctrl-C is for the trainer.
                start_new_session=True,
            )
            arguments = self._process, new
            threading.Thread(
                target=self._solve_all, args=arguments, name="contingencies", daemon=True
            ).start()

    def solve(self, task: PlanningTask) -> PlanningResult | PlanningError:
        """Return the answer to a task: the one that is known, else after a search."""
        for known, answer in list(self._answers):
            if known == task:
                return answer
        return task.solve()

    def knows(self, task: PlanningTask) -> bool:
        """Whether a task has been solved."""
        return any(known == task for known, _ in list(self._answers))

    def stop(self) -> None:
        """Solve nothing more; what is solved stays known."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _solve_all(self, process: "subprocess.Popen[bytes]", tasks: Sequence[PlanningTask]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        # A process that dies has solved less: the rest is solved when it is asked for.
        with suppress(OSError, EOFError, ValueError, pickle.UnpicklingError):
            for task in tasks:
                pickle.dump(task, process.stdin)
                process.stdin.flush()
                self._answers.append((task, pickle.load(process.stdout)))
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                pipe.close()  # Now it ends.
        process.wait()
