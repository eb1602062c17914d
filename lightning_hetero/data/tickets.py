"""Deal iterations to this rank: draw, have them planned ahead, hand out one after the other.

Every rank draws the same iterations in the same order, so all agree on keys, producers and on the
iteration from which new costs hold, without a message.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_hetero.assign.iteration import AssignmentRequest
from lightning_hetero.core.assignment import Assignment
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.data.ahead import AheadPlanner
from lightning_hetero.data.candidates import Candidates, fill_empty
from lightning_hetero.data.order import Cursor, Drawn, IterationSource

__all__ = ["Ticket", "TicketDealer"]


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """One rank's part of one iteration."""

    plan: ParallelPlan | None
    """The plan that runs; None where each rank is a pipeline of its own."""
    microbatches: tuple[tuple[Any, ...], ...]
    """For each micro-batch of the rank's pipeline what the source calls its samples."""
    first_index: int
    """Micro-batches of the pipelines before it."""
    after: Cursor
    """How far the data is consumed when the iteration is done."""


@dataclass(frozen=True, kw_only=True)
class _Ahead:
    drawn: Drawn
    serial: int
    key: str
    request: AssignmentRequest
    candidates: Candidates


class TicketDealer:
    """The iterations of a run as one rank sees them.

    Args:
        source: What iterations are drawn from.
        planner: What plans them.
        candidates: The plans they may run under.
        global_rank: This rank.
        seed: Seed of the dispatch.
        name: Sets its keys apart from those of other dealers with this planner.
    """

    def __init__(
        self,
        source: IterationSource,
        planner: AheadPlanner,
        candidates: Candidates,
        *,
        global_rank: int = 0,
        seed: int = 0,
        name: str = "train",
    ) -> None:
        self._name = name
        self._source = source
        self._planner = planner
        self.candidates = candidates
        """The plans under which what is drawn next may run."""
        self.num_dealt: Counter[ParallelPlan] = Counter()
        """Iterations dealt for each plan."""
        self._slowdowns: tuple[float, ...] | None = None
        self._global_rank = global_rank
        self._seed = seed
        self._drawing: Iterator[Drawn] = iter(())
        self._ahead: deque[_Ahead] = deque()
        self._next: Cursor | None = None
        self._num_starts = 0
        self._serial = 0

    def set_candidates(self, candidates: Candidates) -> int:
        """Assign under other plans; see `set_slowdowns`."""
        self.candidates = candidates
        return self._serial

    def set_slowdowns(self, slowdowns: Sequence[float]) -> int:
        """Assign as if each rank took longer by its factor.

        All ranks call it with the same factors after the same iteration. What is planned already
        stays: return how many iterations were drawn before the first that it holds for.
        """
        self.candidates.slowed(slowdowns)  # Refuses what doesn't fit.
        self._slowdowns = tuple(slowdowns)
        return self._serial

    @property
    def num_ahead(self) -> int:
        """Iterations that are drawn and not dealt."""
        return len(self._ahead)

    def close(self) -> None:
        """Let go of the source."""
        self._drawing = iter(())
        self._ahead.clear()
        self._next = None

    def deal(self, cursor: Cursor) -> Iterator[Ticket]:
        """Yield the tickets from a cursor to the end of its epoch, or of the next if it is there.

        Raises:
            AssignmentError: No candidate plan holds an iteration's samples.
        """
        if cursor != self._next:
            self._start(cursor)
            if not self._ahead and cursor.num_samples:
                self._start(Cursor(epoch=cursor.epoch + 1))
        while True:
            self._look_ahead()
            if not self._ahead:
                self._next = None
                return
            item = self._ahead.popleft()
            ticket = self._ticket(item)
            self._next = self._ahead[0].drawn.before if self._ahead else None
            yield ticket
            if item.drawn.is_last:
                return

    def _start(self, cursor: Cursor) -> None:
        """Draw from a cursor on; forget what was drawn before, whose keys are never used again."""
        self._drawing = self._source.draw(cursor)
        for item in self._ahead:
            self._planner.forget(item.key)
        self._ahead.clear()
        self._num_starts += 1
        self._look_ahead()

    def _look_ahead(self) -> None:
        candidates = self.candidates
        if self._slowdowns is not None:
            candidates = candidates.slowed(self._slowdowns)
        while len(self._ahead) <= self._planner.options.num_ahead:
            drawn = next(self._drawing, None)
            if drawn is None:
                return
            cursor = drawn.before
            request = AssignmentRequest(
                lengths=drawn.lengths,
                candidates=candidates.costs,
                # Of its place in the epoch alone: a resumed run assigns as the whole run does.
                seed=self._seed + cursor.num_samples,
                checksum=drawn.checksum,
            )
            item = _Ahead(
                drawn=drawn,
                serial=self._serial,
                key=f"{self._name}/{self._num_starts}/{cursor.epoch}/{cursor.num_samples}",
                request=request,
                candidates=candidates,
            )
            self._planner.request(item.serial, item.key, request)
            self._ahead.append(item)
            self._serial += 1

    def _ticket(self, item: _Ahead) -> Ticket:
        assignment = self._planner.take(item.serial, item.key, item.request)
        if item.candidates.plans is None:
            assignment = fill_empty(assignment)
        plan = (
            None if item.candidates.plans is None else item.candidates.plans[assignment.plan_index]
        )
        if plan is not None:
            self.num_dealt[plan] += 1
        index = item.candidates.pipeline_index(assignment.plan_index, self._global_rank)
        return Ticket(
            plan=plan,
            microbatches=_samples(assignment, item.drawn, index),
            first_index=sum(len(batches) for batches in assignment.microbatches[: index or 0]),
            after=item.drawn.after,
        )


def _samples(
    assignment: Assignment, drawn: Drawn, index: int | None
) -> tuple[tuple[Any, ...], ...]:
    if index is None:
        return ()
    return tuple(tuple(drawn.samples[i] for i in batch) for batch in assignment.microbatches[index])
