"""Send chunks between ranks in lockstep: no rank waits in the transport for another's storage.

Each rank reads what it sends, and writes what it gets, on threads. In every step all ranks say how
many chunks they have ready and how many they have room for; exactly those are sent, in one order
that all know, so blocking sends can't deadlock. So a disk may be slow for hours. If it hangs, all
ranks learn that its streams have failed, and the transport still works.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lightning_hetero.checkpoint.deadlines import BackgroundThread, HangingError, Patience, Progress
from lightning_hetero.checkpoint.transport import Rounds, Transport, take_turns

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["Lockstep"]

_WINDOW = 2
"""Chunks that each end of a pair holds at most."""
_PAIRS_AT_A_TIME = 4
"""Pairs that one rank serves at a time; bounds its memory and threads."""
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05
_MAX_HANGING = 8
"""Threads given up on, at which no work begins until one of them returns."""


class Lockstep:
    """Carries streams of chunks between pairs of ranks; all ranks make the same calls.

    Args:
        transport: Connects the ranks.
        stall_s: Seconds without progress after which storage counts as failed.
        progress: Ticks with every step.
    """

    def __init__(self, transport: Transport, *, stall_s: float, progress: Progress) -> None:
        self._transport = transport
        self._stall_s = stall_s
        self._rounds = Rounds(transport, progress, stall_s)
        self._moved = threading.Event()
        self._given_up: list[Future[None]] = []

    def run(
        self,
        pairs: Sequence[tuple[int, int]],
        produce: Callable[[int], Iterable[bytes]],
        consume: Callable[[int, Iterator[bytes]], object],
    ) -> dict[int, str]:
        """Let the first rank of each pair stream to the second; every rank calls it. Communicates.

        Args:
            pairs: (sender, receiver), the same on all ranks.
            produce: Returns the chunks of a pair, by its index; called on a thread of the sender.
            consume: Gets a pair's index and chunks; called on a thread of the receiver.

        Returns:
            What went wrong, by index of the pair, the same on all ranks; other pairs go on.

        Raises:
            PeerError: Another rank is gone.
        """
        waiting = take_turns(pairs)
        failed: dict[int, str] = {}
        ends: dict[int, _End] = {}
        pause_s = _FIRST_PAUSE_S
        try:
            while waiting:
                active = _next_pairs(waiting, pairs)
                for index in active:
                    if self._transport.global_rank in pairs[index] and index not in ends:
                        ends[index] = self._open(index, pairs[index], produce, consume)
                self._moved.clear()
                own = [[index, *end.status()] for index, end in ends.items()]
                statuses = [{s[0]: s[1:] for s in rank} for rank in self._rounds.gather(own)]
                over: set[int] = set()
                has_moved = False
                for index in active:
                    sent, kept = (statuses[rank][index] for rank in pairs[index])
                    has_moved |= self._step(pairs[index], ends.get(index), sent, kept)
                    if sent[2] or kept[2] or kept[1]:
                        over.add(index)
                        if why := sent[2] or kept[2]:
                            failed[index] = why
                for index in over & ends.keys():
                    self._given_up.append(ends.pop(index).cut())
                waiting = [index for index in waiting if index not in over]
                if over or has_moved:
                    pause_s = _FIRST_PAUSE_S
                else:
                    self._moved.wait(pause_s)
                    pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)
        finally:
            self._given_up += [end.cut() for end in ends.values()]
        return failed

    def _open(
        self,
        index: int,
        pair: tuple[int, int],
        produce: Callable[[int], Iterable[bytes]],
        consume: Callable[[int, Iterator[bytes]], object],
    ) -> "_End":
        self._given_up = [work for work in self._given_up if not work.done()]
        num_hanging = len(self._given_up)
        is_sender = pair[0] == self._transport.global_rank
        end = _End(is_sender=is_sender, stall_s=self._stall_s, moved=self._moved)

        def work() -> None:
            if num_hanging >= _MAX_HANGING:
                raise HangingError(f"{num_hanging} operations hang in storage already")
            if is_sender:
                for chunk in produce(index):
                    end.put(chunk)
                end.close()
            else:
                consume(index, iter(end.take, None))

        end.start(work)
        return end

    def _step(
        self, pair: tuple[int, int], end: "_End | None", sent: Sequence[Any], kept: Sequence[Any]
    ) -> bool:
        """Send the chunks for which there is room; return whether there were any."""
        if sent[2] or kept[2] or kept[1]:
            return False
        count = min(sent[0], kept[0])
        if end is None:
            return bool(count)
        for _ in range(count):
            if pair[0] == self._transport.global_rank:
                self._transport.send(end.take() or b"", pair[1])
            else:
                end.put(self._transport.receive(pair[0]))
        if sent[1] and count == sent[0]:
            end.close()
        return bool(count)


def _next_pairs(waiting: Sequence[int], pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Return the pairs whose turn it is, a few of each rank's."""
    busy: Counter[int] = Counter()
    active = []
    for index in waiting:
        if all(busy[rank] < _PAIRS_AT_A_TIME for rank in pairs[index]):
            active.append(index)
        busy.update(pairs[index])
    return active


class _End:
    """One rank's end of a pair: a few chunks between the transport and a thread at storage."""

    def __init__(self, *, is_sender: bool, stall_s: float, moved: threading.Event) -> None:
        self._is_sender = is_sender
        self._stall_s = stall_s
        self._moved = moved
        self._chunks: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_cut = False

    def start(self, work: Callable[[], None]) -> None:
        """Begin to read or write."""
        thread = BackgroundThread("checkpoint-lockstep")
        self._progress = thread.progress
        self._patience = Patience(thread.progress, self._stall_s)
        self._work = thread.submit(work)
        self._work.add_done_callback(lambda _: self._moved.set())
        thread.finish()

    def put(self, chunk: bytes) -> None:
        """Add a chunk; waits for room."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_cut or len(self._chunks) < _WINDOW)
            self._refuse_if_cut()
            self._chunks.append(chunk)
            self._note()

    def take(self) -> bytes | None:
        """Return the next chunk, None after the last one; waits for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_cut or self._is_closed or bool(self._chunks))
            self._refuse_if_cut()
            self._note()
            return self._chunks.popleft() if self._chunks else None

    def close(self) -> None:
        """Note that no more chunks will be put."""
        with self._changed:
            if not self._is_closed:
                self._is_closed = True
                self._note()

    def cut(self) -> "Future[None]":
        """End the thread's waits for this end; return its work, which may still hang in storage."""
        with self._changed:
            self._is_cut = True
            self._note()
        return self._work

    def status(self) -> tuple[int, bool, str]:
        """Return the number of chunks ready, or that have room; whether it was all; the error."""
        with self._changed:
            count = len(self._chunks)
            is_closed = self._is_closed
        error = self._work.exception() if self._work.done() else None
        if error is not None:
            return 0, True, str(error) or repr(error)
        if self._is_sender:
            is_due = not count and not is_closed
        else:
            is_due = (count > 0 or is_closed) and not self._work.done()
        if not is_due:
            self._progress.tick()
        if self._patience.is_over:
            return 0, True, f"storage hasn't moved for {self._stall_s:g} s"
        return (count, is_closed, "") if self._is_sender else (
            _WINDOW - count, self._work.done(), ""
        )  # fmt: skip

    def _note(self) -> None:
        self._progress.tick()
        self._changed.notify_all()
        self._moved.set()

    def _refuse_if_cut(self) -> None:
        if self._is_cut:
            raise TimeoutError("This came too late.")
