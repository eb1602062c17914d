"""The loader that a Trainer iterates: tickets in, this rank's collated micro-batches out.

It deals by pipeline itself, so strategies leave it alone. Its state is the data's cursor, which any
number of ranks, workers and any plan can go on from. Iterations that workers have fetched but that
were not handed out don't count, nor does the one that a Trainer fetches ahead of an unsized stream.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from lightning_hetero.data.order import Cursor, Progress
from lightning_hetero.data.samples import as_is
from lightning_hetero.data.tickets import Ticket, TicketDealer
from lightning_hetero.models.batches import AssignedBatch

__all__ = ["AssignedLoader", "BatchMaker", "SizedLoader"]

_NUM_REMEMBERED = 4


class BatchMaker:
    """Makes a ticket's micro-batches; a dataset whose keys are what the tickets say of them.

    Args:
        samples: What a ticket's indices mean; None where tickets hold the samples themselves.
        collate: Makes a micro-batch of samples.
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
        progress: What is handed out; shared with whoever saves and loads it.
        num_workers: Processes that read samples and collate; 0 does it here.
        restarts: Whether each pass begins a new epoch instead of going on where the last ended.
        num_trained: Says how many iterations of the epoch were trained, where whoever iterates may
            fetch ahead; None counts what was handed out.
    """

    deals_by_pipeline = True

    def __init__(
        self,
        dealer: TicketDealer,
        maker: BatchMaker,
        progress: Progress,
        *,
        num_workers: int = 0,
        restarts: bool = False,
        num_trained: Callable[[], int | None] | None = None,
    ) -> None:
        self.dealer = dealer
        self.stall_s = 0.0
        """Seconds that drawing and waiting for a plan took before the latest batch."""
        self.batch_sampler = _EpochSetter(progress)
        """Told of epochs by Lightning, which would ask for more if the loader had a `sampler`."""
        self._progress = progress
        self._restarts = restarts
        self._num_trained = num_trained
        self._tickets = _Tickets(dealer, progress)
        self._recent: deque[Cursor] = deque(maxlen=_NUM_REMEMBERED)
        self._maker = maker
        self._num_workers = num_workers

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
        """Return how far the data is consumed; the same on every rank."""
        return self._progress.state_dict(self._trained())

    @property
    def num_fetched(self) -> int:
        """Iterations that are dealt and not trained, as far as that is known."""
        trained = self._trained()
        num_given = 0 if trained is None else len(self._recent) - 1 - self._recent.index(trained)
        return len(self._tickets.dealt) + num_given

    def rewind(self) -> None:
        """Take back what was fetched last and not trained, unless another epoch has begun since.

        A Trainer that reloads its data loaders begins an epoch twice, and has fetched by then.
        """
        trained = self._trained()
        if trained is not None and self._progress.cursor == self._recent[-1]:
            self._progress.cursor = trained

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was saved, under any topology; CheckpointError if it can't."""
        self._progress.load_state_dict(state)

    def _trained(self) -> Cursor | None:
        """Return how far the Trainer has come, who may have fetched more; None if unknown."""
        done = None if self._num_trained is None else self._num_trained()
        trained = [cursor for cursor in self._recent if cursor.num_iterations == done]
        return trained[-1] if trained else None


class SizedLoader(AssignedLoader):
    """A loader whose number of iterations is known, the same in every epoch.

    Args:
        num_iterations: That number.
    """

    def __init__(self, *args: Any, num_iterations: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._num_iterations = num_iterations

    def __len__(self) -> int:
        return self._num_iterations


class _EpochSetter:
    """The owner of `loader.batch_sampler.sampler.set_epoch`, which Lightning calls."""

    def __init__(self, progress: Progress) -> None:
        self.set_epoch = progress.set_epoch
        self.sampler = self


class _Tickets:
    """DataLoader's sampler: deals from the cursor on whenever it is iterated.

    It doesn't know the loader: workers whose iterator is part of a cycle are slow to end.
    """

    def __init__(self, dealer: TicketDealer, progress: Progress) -> None:
        self.dealt: deque[Ticket] = deque()
        """Tickets whose batches aren't handed out yet."""
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
    """Return what the strategy runs; without plans the rank's only micro-batch as it is."""
    if ticket.plan is None:
        return microbatches[0]
    return AssignedBatch(
        plan=ticket.plan, microbatches=microbatches, first_index=ticket.first_index
    )
