"""Run many members of a run in virtual time, against a store that answers one call after another.

Each is a thread, and one of them runs at a time: until it sleeps or calls the store, which takes no
virtual time but what the store needs. So a test tells what a thousand processes would wait for,
whatever machine it runs on.
"""

import heapq
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from lightning_hetero.core import process
from lightning_hetero.runtime.generation import membership
from lightning_hetero.runtime.generation.membership import Membership
from lightning_hetero.runtime.ranks import heartbeat

_MODULES = membership, heartbeat, process
_STACK_BYTES = 512 * 1024


class Timeline:
    """Virtual seconds, and a store whose calls take some.

    Args:
        call_s: What the store needs for a call.
        way_s: From a member to the store and back.
        key_s: What it needs for each key of a call that reads several.
        byte_s: What the store needs for each byte that it sends.
    """

    def __init__(
        self,
        *,
        call_s: float = 20e-6,
        way_s: float = 200e-6,
        key_s: float = 2.7e-6,
        byte_s: float = 1e-9,
    ) -> None:
        self.now_s = 0.0
        self.num_calls = 0
        self.busy_s = 0.0
        """How long the store has worked."""
        self.store: Any = _Store(dist.HashStore(), self)
        self._call_s, self._way_s, self._key_s, self._byte_s = call_s, way_s, key_s, byte_s
        self._free_s = 0.0
        """When the store has answered all calls so far."""
        self._queue: list[tuple[float, int, threading.Semaphore]] = []
        self._order = count()
        self._next = threading.Semaphore(0)
        self._own = threading.local()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """In this context let the members' modules tell the time by it."""
        virtual = SimpleNamespace(sleep=self.sleep, monotonic=lambda: self.now_s)
        with pytest.MonkeyPatch.context() as patch:
            for module in _MODULES:
                patch.setattr(module, "time", virtual)
            yield

    def run(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """Do all of it at once; return each result, or the error that ended it."""
        results: list[Any] = [None] * len(works)

        def begin(index: int) -> None:
            self._own.turn = turns[index]
            turns[index].acquire()
            try:
                results[index] = works[index]()
            except Exception as error:
                results[index] = error
            self._next.release()

        turns = [threading.Semaphore(0) for _ in works]
        before = threading.stack_size(_STACK_BYTES)
        threads = [threading.Thread(target=begin, args=(i,)) for i in range(len(works))]
        for thread, turn in zip(threads, turns, strict=True):
            thread.start()
            self._wake_at(self.now_s, turn)
        threading.stack_size(before)
        while self._queue:
            self.now_s, _, turn = heapq.heappop(self._queue)
            turn.release()
            self._next.acquire()
        for thread in threads:
            thread.join()
        return results

    def sleep(self, seconds: float) -> None:
        """Let others run for so long."""
        turn = self._own.turn
        self._wake_at(self.now_s + seconds, turn)
        self._next.release()
        turn.acquire()

    def wait_for_store(self, found: Any) -> None:
        """Wait for a call that finds this, in turn with all calls before it."""
        self.num_calls += 1
        needed_s = self._call_s
        if isinstance(found, list):
            needed_s += self._key_s * len(found)
        elif isinstance(found, bytes):
            needed_s += self._byte_s * len(found)
        self.busy_s += needed_s
        self._free_s = max(self.now_s, self._free_s) + needed_s
        if hasattr(self._own, "turn"):
            self.sleep(self._free_s + self._way_s - self.now_s)

    def _wake_at(self, at_s: float, turn: threading.Semaphore) -> None:
        heapq.heappush(self._queue, (at_s, next(self._order), turn))


class _Store:
    """A store whose calls take virtual time."""

    def __init__(self, store: dist.Store, timeline: Timeline) -> None:
        self._store, self._timeline = store, timeline

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def timed(*given: Any) -> Any:
            found = call(*given)
            self._timeline.wait_for_store(found)
            return found

        return timed


class _Signs(heartbeat.Heartbeat):
    """What one member sees of the others' beats, of which the first members have stopped."""

    def __init__(self, timeline: Timeline, number: int, num_frozen: int, silence_s: float) -> None:
        interval_s = heartbeat.interval_s(silence_s)
        super().__init__(timeline.store, number=number, interval_s=interval_s)
        self._timeline, self._num_frozen = timeline, num_frozen
        self._read_beats(timeline.store, [number])

    def _look_at(self, number: int, beats: int) -> float:
        moves = number >= self._num_frozen
        return super()._look_at(number, int(self._timeline.now_s * 100) if moves else beats)


class Formed(NamedTuple):
    """How the second generation of a run has formed."""

    lost: set[tuple[int, ...]]
    """Ranks of the first one that aren't in it, as each of its members knows them."""
    seconds: float
    """Virtual ones."""
    num_calls: int
    """Calls of the store."""
    busy_s: float
    """Virtual seconds for which the store has worked."""


def form_next(
    num_members: int, *, num_frozen: int = 0, num_here: int = 0, silence_s: float = 1.0
) -> Formed:
    """Form the second generation without the first members, which are frozen.

    Args:
        num_members: Members of the first generation.
        num_frozen: How many of them are frozen.
        num_here: How many of these said before that they are here.
        silence_s: For how long members may be silent.
    """
    timeline = Timeline()
    everyone = [
        Membership(
            timeline.store,
            _Signs(timeline, number, num_frozen, silence_s),
            node="a",
            facts={},
            silence_s=silence_s,
        )
        for number in range(num_members)
    ]
    with timeline.in_use():
        timeline.run([partial(member.form_first, num_members) for member in everyone])
        for frozen in everyone[:num_here]:
            frozen._say_here(1)
        begin_s, before, busy_s = timeline.now_s, timeline.num_calls, timeline.busy_s
        pairs = timeline.run([member.form_next for member in everyone[num_frozen:]])
    lost = {old.without(new) for old, new in pairs}
    seconds, num_calls = timeline.now_s - begin_s, timeline.num_calls - before
    return Formed(lost, seconds, num_calls, timeline.busy_s - busy_s)
