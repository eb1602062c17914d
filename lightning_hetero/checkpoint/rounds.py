"""How ranks wait for each other's slow work over a transport whose own waits are short.

A rank whose storage is slow takes part in an exchange every second at most and says that it isn't
done yet. So no rank waits in the transport for longer than that, however slow storage is, and no
rank is given up while its work moves. Work that doesn't move any more is given up by the rank
itself: all learn of it in the same round, and the transport is as good as before.
"""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from lightning_hetero.checkpoint.background import BackgroundThread, Patience, Progress
from lightning_hetero.checkpoint.transport import Transport

__all__ = ["Rounds", "finish_together"]

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0
_STALL_S = 300.0
_T = TypeVar("_T")


class Rounds:
    """Exchanges of statuses; all ranks make the same calls in the same order, from one thread.

    Args:
        transport: The ranks.
        progress: Is told of every exchange.
        stall_s: Seconds after which work that doesn't move is given up.
    """

    def __init__(self, transport: Transport, progress: Progress, stall_s: float) -> None:
        self._transport = transport
        self._progress = progress
        self._stall_s = stall_s

    def gather(self, status: Any) -> list[Any]:
        """Return what each rank says, by rank; it must fit into JSON."""
        data = self._transport.all_gather(json.dumps(status).encode())
        self._progress.tick()
        return [json.loads(item) for item in data]

    def finish(
        self,
        work: "Future[Any]",
        thread: BackgroundThread,
        describe: Callable[[Any], Mapping[str, Any]],
    ) -> list[dict[str, Any]]:
        """Wait until all ranks' work is done; return what each one says about it, by rank.

        Args:
            work: This rank's.
            thread: The thread that does it.
            describe: Turns what it came to, None if nothing, into a status. A rank whose work
                failed or was given up says why under "error" besides.
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
    work: Callable[[], _T], transport: Transport, describe: Callable[[_T], Mapping[str, Any]]
) -> "tuple[Future[_T], list[dict[str, Any]]]":
    """Let all ranks do something once, on a thread; as `Rounds.finish`, with what it came to."""
    thread = BackgroundThread("checkpoint-start")
    done = thread.submit(work)
    thread.finish()
    rounds = Rounds(transport, Progress(), _STALL_S)
    return done, rounds.finish(done, thread, lambda it: {} if it is None else describe(it))
