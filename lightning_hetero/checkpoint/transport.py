"""Exchange bytes between ranks for checkpoints, and wait for each other's slow work.

`runtime` implements `Transport`. All ranks concerned make its calls in one agreed order, so
blocking sends can't deadlock.

A transport's own waits must be short. So a rank with slow storage takes part in an exchange at
least every second and says that it isn't done yet (`Rounds`): no rank waits longer in the
transport, however slow storage is, and no rank is given up while its work makes progress. A rank
gives up its own work if that hangs: all learn of it in the same round, and the transport still
works.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar

from lightning_hetero.checkpoint.deadlines import BackgroundThread, Patience, Progress
from lightning_hetero.core.errors import CheckpointError

__all__ = ["Rounds", "SoloTransport", "Transport", "finish_together", "gather_json", "take_turns"]


class Transport(Protocol):
    """Blocking exchange between the ranks of a run; PeerError if another one is gone."""

    @property
    def global_rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def all_gather(self, data: bytes) -> list[bytes]:
        """Send `data` to all ranks; return each rank's data, by rank. All ranks call it."""

    def send(self, data: bytes, destination: int) -> None:
        """Send bytes of any length to a rank that calls `receive`."""

    def receive(self, source: int) -> bytes:
        """Return the next bytes that a rank sends here."""


class SoloTransport:
    """The only rank of a run."""

    global_rank = 0
    world_size = 1

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the one contribution."""
        return [data]

    def send(self, data: bytes, destination: int) -> None:
        """Refuse: there is nobody else."""
        raise AssertionError(f"a single rank sends {len(data)} bytes to rank {destination}")

    def receive(self, source: int) -> bytes:
        """Refuse: there is nobody else."""
        raise AssertionError(f"a single rank receives from rank {source}")


def gather_json(transport: Transport, value: Any) -> list[Any]:
    """Return each rank's value, by rank; values must fit into JSON. All ranks call it."""
    return [json.loads(data) for data in transport.all_gather(json.dumps(value).encode())]


def take_turns(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Return an order of (sender, receiver) pairs, as indices, in which many run in parallel.

    In each round a rank has at most one pair. If every rank works through its own pairs in this
    order, blocking sends can't deadlock: both ends of the first unfinished pair are free.
    """
    free_round: dict[int, int] = defaultdict(int)
    rounds = []
    for sender, receiver in pairs:
        turn = max(free_round[sender], free_round[receiver])
        free_round[sender] = free_round[receiver] = turn + 1
        rounds.append(turn)
    return sorted(range(len(pairs)), key=rounds.__getitem__)


_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0
_STALL_S = 450.0
"""Longer than a hanging place is waited for, so that it is reported as that place's failure."""
_T = TypeVar("_T")


class Rounds:
    """Exchanges of statuses; all ranks make the same calls in the same order, from one thread.

    Args:
        transport: Connects the ranks.
        progress: Ticks with every exchange.
        stall_s: Seconds without progress after which work is given up.
    """

    def __init__(self, transport: Transport, progress: Progress, stall_s: float) -> None:
        self._transport = transport
        self._progress = progress
        self._stall_s = stall_s

    def gather(self, status: Any) -> list[Any]:
        """Return each rank's status, by rank; statuses must fit into JSON."""
        statuses = gather_json(self._transport, status)
        self._progress.tick()
        return statuses

    def finish(
        self,
        work: "Future[Any]",
        thread: BackgroundThread,
        describe: Callable[[Any], Mapping[str, Any]],
    ) -> list[dict[str, Any]]:
        """Wait until all ranks' work is done; return each rank's status, by rank.

        Args:
            work: This rank's work.
            thread: The thread that does it.
            describe: Turns the result of the work (None without one) into a status. If the work
                failed or was given up, the reason is added as "error".
        """
        patience = Patience(thread.progress, self._stall_s)
        pause_s, status = _FIRST_PAUSE_S, None
        while True:
            if status is None:
                wait([work], timeout=pause_s)
                status = self._status(work, patience, describe)
            statuses = self.gather(status)
            if None not in statuses:
                return statuses
            pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)

    def _status(
        self,
        work: "Future[Any]",
        patience: Patience,
        describe: Callable[[Any], Mapping[str, Any]],
    ) -> dict[str, Any] | None:
        if work.done():
            error = work.exception()
            if error is None:
                return dict(describe(work.result()))
            return {**describe(None), "error": f"Rank {self._transport.global_rank}: {error}"}
        if patience.is_over:
            why = f"storage hasn't moved for {self._stall_s:g} s"
            return {**describe(None), "error": f"Rank {self._transport.global_rank}: {why}."}
        return None


def finish_together(
    work: Callable[[Progress], _T],
    transport: Transport,
    describe: Callable[[_T], Mapping[str, Any]] = lambda _: {},
    *,
    may_fail: bool = False,
) -> "tuple[Future[_T], list[dict[str, Any]]]":
    """Do something once on all ranks, each on a thread; return this rank's future and all statuses.

    A rank is waited for as long as its work ticks its progress. If another rank is lost, the work
    is given up, and may end later.

    Raises:
        CheckpointError: The work of a rank failed, unless it `may_fail`; all ranks raise it.
    """
    thread = BackgroundThread("checkpoint-start")
    done = thread.submit(work, thread.progress)
    thread.finish()
    rounds = Rounds(transport, Progress(), _STALL_S)
    try:
        answers = rounds.finish(done, thread, lambda it: {} if it is None else describe(it))
    except BaseException:
        thread.progress.is_given_up = True
        raise
    errors = [answer["error"] for answer in answers if "error" in answer]
    if errors and not may_fail:
        raise CheckpointError(" ".join(errors))
    return done, answers
