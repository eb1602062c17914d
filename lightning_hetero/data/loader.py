"""The loader of `HeteroDataModule`: draws iterations and collates this rank's micro-batches.

Every rank draws the same iterations in the same order. So all ranks agree, without messages, on the
keys of assignments and on the first iteration for which new costs count. Iterations are planned
ahead and handed out in order.

The loader distributes samples over pipelines itself, so strategies don't change it. Its state is
the data's cursor, from which a run can be resumed under any plan, with any number of ranks and
workers. Iterations that were fetched but not trained don't count: those of workers, and the one
that a Trainer prefetches from a stream without a length.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch.utils.data import DataLoader

from lightning_hetero.assign.iteration import AssignmentRequest
from lightning_hetero.core.actions import Assignment
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.data.ahead import AheadPlanner
from lightning_hetero.data.candidates import Candidates, fill_empty
from lightning_hetero.data.order import Cursor, Drawn, IterationSource, Progress
from lightning_hetero.data.samples import as_is
from lightning_hetero.models.batches import AssignedBatch

_NUM_REMEMBERED = 4


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """One rank's part of one iteration: the plan and the samples of its micro-batches."""

    plan: ParallelPlan | None
    """The plan that runs; None if each rank is a pipeline of its own."""
    microbatches: tuple[tuple[Any, ...], ...]
    """The samples of each micro-batch of the rank's pipeline, as in `Drawn.samples`."""
    first_index: int
    """Number of micro-batches in the pipelines before this rank's."""
    after: Cursor
    """The cursor at the end of the iteration."""


@dataclass(frozen=True, kw_only=True)
class _Ahead:
    """An iteration whose assignment was requested, and which isn't dealt yet."""

    drawn: Drawn
    key: str
    request: AssignmentRequest
    candidates: Candidates


class TicketDealer:
    """Draws iterations, has them assigned ahead of time, and returns one rank's part of each.

    Args:
        source: The source of iterations.
        planner: Assigns the iterations.
        candidates: The plans they may run under.
        global_rank: This rank.
        name: Prefix of its keys; different for each dealer that uses this planner.
    """

    def __init__(
        self,
        source: IterationSource,
        planner: AheadPlanner,
        candidates: Candidates,
        *,
        global_rank: int = 0,
        name: str = "train",
    ) -> None:
        self._name = name
        self._source = source
        self._planner = planner
        self.candidates = candidates
        """The candidate plans of iterations that are drawn from now on."""
        self.num_dealt: Counter[ParallelPlan] = Counter()
        """Iterations dealt for each plan."""
        self._slowdowns: tuple[float, ...] | None = None
        self._global_rank = global_rank
        self._drawing: Iterator[Drawn] = iter(())
        self._ahead: deque[_Ahead] = deque()
        self._next: Cursor | None = None
        self._num_starts = 0
        self._serial = 0

    def set_candidates(self, candidates: Candidates) -> int:
        """Set the candidate plans of iterations drawn from now on; returns as `set_slowdowns`."""
        self.candidates = candidates
        return self._serial

    def set_slowdowns(self, slowdowns: Sequence[float]) -> int:
        """Assign the iterations that follow as if each rank took longer by its factor.

        All ranks call it with the same factors after the same iteration. Returns the number of
        iterations drawn so far, whose assignments stay as they are.

        Raises:
            ConfigurationError: A factor is missing, or isn't above 0.
        """
        self.candidates.slowed(slowdowns)  # Only to check the factors.
        self._slowdowns = tuple(slowdowns)
        return self._serial

    @property
    def num_ahead(self) -> int:
        """Number of iterations that are drawn but not dealt yet."""
        return len(self._ahead)

    def close(self) -> None:
        """Drop the source's iterator and the iterations drawn ahead."""
        self._drawing = iter(())
        self._ahead.clear()
        self._next = None

    def deal(self, cursor: Cursor) -> Iterator[Ticket]:
        """Yield the tickets from a cursor to its epoch's end, each when it is assigned.

        If the cursor is at the end of an epoch, these are the tickets of the next epoch.

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
        """Draw from a cursor on; drop the iterations drawn ahead, whose keys aren't reused."""
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
        while len(self._ahead) <= self._planner.num_ahead:
            drawn = next(self._drawing, None)
            if drawn is None:
                return
            cursor = drawn.before
            request = AssignmentRequest(
                lengths=drawn.lengths,
                candidates=candidates.costs,
                checksum=drawn.checksum,
            )
            item = _Ahead(
                drawn=drawn,
                key=f"{self._name}/{self._num_starts}/{cursor.epoch}/{cursor.num_samples}",
                request=request,
                candidates=candidates,
            )
            self._planner.request(item.key, request)
            self._ahead.append(item)
            self._serial += 1

    def _ticket(self, item: _Ahead) -> Ticket:
        assignment = self._planner.take(item.key, item.request)
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


class BatchMaker:
    """A dataset that maps tickets' `microbatches` to collated micro-batches.

    Args:
        samples: The samples by index; None if tickets hold the samples themselves.
        collate: Makes a micro-batch of a list of samples.
    """

    def __init__(self, samples: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._samples = samples
        self._collate = collate

    def __getitem__(self, microbatches: tuple[tuple[Any, ...], ...]) -> tuple[Any, ...]:
        if self._samples is None:
            return tuple(self._collate(list(batch)) for batch in microbatches)
        return tuple(self._collate([self._samples[key] for key in b]) for b in microbatches)


class AssignedLoader:
    """One rank's batches of every iteration.

    Args:
        dealer: Deals the tickets.
        maker: Makes their batches.
        progress: The run's cursor, which each batch moves; shared with the data module.
        num_workers: Processes that read samples and collate; 0 uses this process.
        restarts: Whether each pass begins a new epoch instead of continuing the last one.
        num_trained: Returns how many iterations of the epoch were trained. A Trainer that
            prefetches has taken more batches than that. None counts every batch that was taken as
            trained.
        num_iterations: Iterations of every epoch; None if they aren't known.
    """

    deals_by_pipeline = True

    def __init__(  # noqa: PLR0913 - what a loader consists of
        self,
        dealer: TicketDealer,
        maker: BatchMaker,
        progress: Progress,
        *,
        num_workers: int = 0,
        restarts: bool = False,
        num_trained: Callable[[], int | None] | None = None,
        num_iterations: int | None = None,
    ) -> None:
        self.dealer = dealer
        self.stall_s = 0.0
        """Seconds before the latest batch that were spent on drawing and on waiting for its
        assignment."""
        self.batch_sampler = SimpleNamespace(sampler=progress)
        """Only for Lightning, which sets the epoch through a loader's `batch_sampler`.

        It would also do so through a `sampler`, but expects more of a loader that has one.
        """
        self._progress = progress
        self._restarts = restarts
        self._num_trained = num_trained
        self._tickets = _Tickets(dealer, progress)
        self._recent: deque[Cursor] = deque(maxlen=_NUM_REMEMBERED)
        self._maker = maker
        self._num_workers = num_workers
        self._num_iterations = num_iterations

    def __len__(self) -> int:
        if self._num_iterations is None:
            raise TypeError("A stream's number of iterations isn't known.")
        return self._num_iterations

    def __iter__(self) -> Iterator[Any]:
        if self._restarts and self._progress.cursor.num_samples:
            self._progress.end_epoch()
        self.rewind()
        self._tickets.dealt.clear()
        self._recent.clear()
        self._recent.append(self._progress.cursor)
        # Made for each pass, so that its workers end with the pass.
        batches: DataLoader[Any] = DataLoader(
            self._maker,  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._tickets,
            collate_fn=as_is,
            num_workers=self._num_workers,
        )
        for microbatches in batches:
            ticket = self._tickets.dealt.popleft()
            self._progress.cursor = ticket.after
            self._recent.append(self._progress.cursor)
            self.stall_s = self._tickets.take_waited_s()
            yield _batch_of(ticket, microbatches)
        self._progress.end_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor after the last trained iteration; the same on every rank."""
        return self._progress.state_dict(self._trained())

    @property
    def num_fetched(self) -> int:
        """Number of iterations that are dealt but not trained yet, as far as known."""
        trained = self._trained()
        num_given = 0 if trained is None else len(self._recent) - 1 - self._recent.index(trained)
        return len(self._tickets.dealt) + num_given

    def rewind(self) -> None:
        """Move the cursor back to the last trained iteration, unless another epoch has begun.

        A Trainer that reloads its data loaders begins an epoch twice, after it has prefetched.
        """
        trained = self._trained()
        if trained is not None and self._progress.cursor == self._recent[-1]:
            self._progress.cursor = trained

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, with any ranks; CheckpointError if it is of another order."""
        self._progress.load_state_dict(state)

    def _trained(self) -> Cursor | None:
        """Return the cursor after the last iteration that was trained; None if unknown."""
        done = None if self._num_trained is None else self._num_trained()
        trained = [cursor for cursor in self._recent if cursor.num_iterations == done]
        return trained[-1] if trained else None


class _Tickets:
    """The sampler of torch's DataLoader: each iteration over it continues from the cursor.

    It doesn't refer to the loader: as part of a reference cycle, workers would end late.
    """

    def __init__(self, dealer: TicketDealer, progress: Progress) -> None:
        self.dealt: deque[Ticket] = deque()
        """Tickets whose batches haven't been handed out yet."""
        self._dealer = dealer
        self._progress = progress
        self._waited_s = 0.0

    def take_waited_s(self) -> float:
        """Return the seconds that dealing took since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def __iter__(self) -> Iterator[tuple[tuple[Any, ...], ...]]:
        tickets = self._dealer.deal(self._progress.cursor)
        while True:
            start_s = time.perf_counter()
            ticket = next(tickets, None)
            self._waited_s += time.perf_counter() - start_s
            if ticket is None:
                return
            self.dealt.append(ticket)
            yield ticket.microbatches


def _batch_of(ticket: Ticket, microbatches: tuple[Any, ...]) -> Any:
    """Return the batch that the strategy runs; without plans the rank's only micro-batch."""
    if ticket.plan is None:
        return microbatches[0]
    return AssignedBatch(
        plan=ticket.plan, microbatches=microbatches, first_index=ticket.first_index
    )
