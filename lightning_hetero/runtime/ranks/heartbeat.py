"""Send this process's heartbeat, and watch those of others.

A heartbeat is a counter in the run's store, one for each process. The process increases it as long
as others may wait for it: as a rank of one generation after another, as a member that agrees on the
next generation, and as a joiner. `silence_s` returns for how long a counter hasn't changed; it is
used wherever one process needs to know whether another one is alive.

Ranks that train together form a `Ring`, in which each watches the next one. A round takes three
calls of the store, whatever the number of ranks: increase the own counter, read the number of news,
and read the counter of the watched rank. More is read only if there are news or the watched rank is
silent. Then the ranks behind the silent one are watched as well: the ranks of a node are lost
together, and each of them was the one that watched the next. Once a connection has broken, rounds
follow each other quickly until the reason is known.

A call to a store whose server is frozen never returns and can't be cancelled. So a thread makes
these calls; other threads read what it has found, and whether it still gets answers.
"""

import json
import math
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from lightning_hetero.core.process import Deadline

__all__ = ["Bulletin", "Heartbeat", "Ring", "Silence", "Watch", "interval_s"]

_FAILURE, _HEARD, _NEWS = "failure", "heard", "news"
_SERVER_LEFT, _SUSPICION = "server left", "suspicion"
_GONE = 2**32
"""Larger than any number of heartbeats; a process that ends adds it to its counter."""
_OF_A_NODE = 16
"""Number of ranks to watch when the first of them is silent: about those of a node."""
_SILENT_ROUNDS = 1.5
"""Rounds without a heartbeat after which a rank counts as silent."""


def interval_s(silence_s: float) -> float:
    """Return the seconds between two beats if a process counts as lost after `silence_s`."""
    return min(0.5, silence_s / 10)


class Silence:
    """Measures for how long something has shown no sign of life while this process could see it.

    Args:
        nap_s: Largest number of seconds that count between two checks. If this process was stopped,
            or got no time on a busy machine, it couldn't see others meanwhile.
        sign: The last sign of life, if one is known.
    """

    def __init__(self, nap_s: float, *, sign: object = None) -> None:
        self._nap_s = nap_s
        self._sign = sign
        self._looked_at_s = time.monotonic()
        self.seconds = 0.0
        """Seconds of silence so far."""

    def look(self, sign: object) -> float:
        """Compare with the present sign; return the seconds of silence, 0 if the sign changed."""
        now_s = time.monotonic()
        gap_s = min(now_s - self._looked_at_s, self._nap_s)
        self.seconds = 0.0 if sign != self._sign else self.seconds + gap_s
        self._sign, self._looked_at_s = sign, now_s
        return self.seconds


class Bulletin(Protocol):
    """A source other than the ranks that reports which rank is gone, such as a worker's keeper."""

    @property
    def patience_s(self) -> float:
        """Seconds that others wait for a rank that is alive, once another rank is gone."""

    def num_news(self) -> int:
        """Return a number that each news increases; one call of a store."""

    def find_gone(self) -> tuple[int, str] | None:
        """Return a rank that is gone, and why; None if none is."""


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Processes that train together and watch each other."""

    numbers: tuple[int, ...]
    """For each rank the number of its process, which names its counter."""
    rank: int
    """The rank of this process."""
    name: str = "ring"
    """Prefix of the ring's news in the store; different for each ring of the run."""
    bulletin: Bulletin | None = None
    """A further source, which is read in every round; None without one."""


class Watch:
    """What a process knows of its ring: written by its heartbeat, read by the `FailureDetector`.

    Args:
        ring: The ring.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.failure: str | None = None
        """The first failure that any rank has reported; None so far."""
        self.failed_rank = -1
        """The rank that failed, and may be dead; -1 if there is none."""
        self.is_suspicious = False
        """Whether any rank has lost a connection; then silent ranks count as dead sooner."""
        self.wakes_judge = threading.Event()
        """Set when there is a failure, or when watching ends: the judging thread then continues."""
        self.has_server_left = False
        """Whether rank 0 has ended normally; then the loss of the store is no failure."""
        self.peer = (ring.rank + 1) % len(ring.numbers)
        """The watched rank: the next one that hasn't ended normally; this rank if there is none."""
        self.peer_silence_s = 0.0
        """Seconds for which the watched rank has been silent."""
        self.num_news = 0
        self.to_tell: str | None = None
        self.suspects = False


class Heartbeat:
    """One process's heartbeat, from `begin` to `end`; may begin again.

    All processes of a run must begin equally often, because their n-th counters belong together.

    Args:
        store: The run's store; the thread uses a connection of its own.
        number: This process's number.
        interval_s: Seconds between two rounds.
    """

    def __init__(self, store: Store, *, number: int, interval_s: float) -> None:
        self._store = self._own = store
        self.number = number
        self.interval_s = interval_s
        self._start = 0
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._silences: dict[int, Silence] = {}
        """For each process that was ever watched, by number, its silence."""
        self._watch: Watch | None = None
        self._suspected_at_s = -math.inf
        self._is_ending = False
        self.has_begun = threading.Event()
        """Set once the store has answered."""
        self.num_rounds = 0
        """Number of rounds in which the store has answered."""
        self.is_store_gone = False
        """Whether the store has closed the connection."""

    def begin(self) -> None:
        """Begin to send heartbeats, unless this process does already."""
        if self._thread is None:
            self._is_ending = self.is_store_gone = False
            self._watch, self._silences = None, {}
            self.has_begun.clear()
            self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self._thread.start()

    def watch(self, ring: Ring) -> Watch:
        """Watch another ring from now on; return what is known of it, which is updated."""
        self._watch = watch = Watch(ring)
        self._suspected_at_s = -math.inf
        self._wake.set()
        return watch

    def tell(self, failed_rank: int, reason: str) -> None:
        """Tell the others that a rank has failed; the first failure that any rank tells counts."""
        if self._watch is not None:
            self._watch.to_tell = json.dumps({"rank": failed_rank, "reason": reason})
        self._wake.set()

    def wait_until_heard(self, timeout_s: float) -> None:
        """Wait until each rank knows which rank has failed, for at most `timeout_s`."""
        watch, deadline = self._watch, Deadline(timeout_s)
        if watch is None:
            return
        key, num_ranks = self._key(watch, _HEARD), len(watch.ring.numbers)
        with suppress(DistError):  # Without the store nobody can be told.
            while self._store.add(key, 0) < num_ranks and not deadline.is_over:
                time.sleep(self.interval_s / 20)

    def suspect(self) -> None:
        """Tell the others that a connection has broken, so that a rank may be dead."""
        self._suspected_at_s = time.monotonic()
        if self._watch is not None:
            self._watch.suspects = True
        self._wake.set()

    def beats_of(self, number: int) -> int:
        """Return a process's counter; one call of the store, by any thread.

        After the process has ended normally, the counter is larger than any number of heartbeats.
        """
        return int(self._store.add(self._beat(number), 0))

    def silence_s(self, number: int) -> float:
        """Return for how many seconds a process was seen to be silent; one call of a store."""
        return self._look_at(number, self.beats_of(number))

    def end(self, timeout_s: float) -> None:
        """Report a normal end, so that this process doesn't count as dead.

        Waits for the store, for at most `timeout_s`. Rank 0 waits a moment longer, until the others
        know that the loss of its store will be no failure.
        """
        self._is_ending = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._thread = None

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._own = self._store.clone()  # type: ignore[attr-defined]
            self._start = int(self._own.add(f"starts/{self.number}", 1))
            while not self._is_ending:
                self._round()
                self.has_begun.set()
                self._wake.wait(self._pause_s())
                self._wake.clear()
            self._say_goodbye()
        except Exception:
            # The client's own errors have many types, and the process may be partly torn down.
            self.is_store_gone = True

    def _pause_s(self) -> float:
        """Return the seconds until the next round."""
        watch = self._watch
        # News of a failed rank come within moments; after this time only silence tells.
        is_over = time.monotonic() - self._suspected_at_s > 6 * self.interval_s
        if watch is None or is_over or watch.failure is not None:
            return self.interval_s
        # With more than 100 ranks each waits longer, so that the store gets no more calls in total.
        return min(max(0.01, 1e-4 * len(watch.ring.numbers)), self.interval_s)

    def _round(self) -> None:
        self._own.add(self._beat(self.number), 1)
        watch = self._watch
        if watch is not None:
            self._hear(watch)
            self._watch_peer(watch)
            self._watch_further(watch)
        self.num_rounds += 1

    def _hear(self, watch: Watch) -> None:
        store, ring = self._own, watch.ring
        num_news = store.add(self._key(watch, _NEWS), self._tell(watch))
        if ring.bulletin is not None:
            num_news += ring.bulletin.num_news()
        if num_news != watch.num_news:
            watch.num_news = num_news
            self._read_news(watch)

    def _tell(self, watch: Watch) -> int:
        """Write this rank's news into the store; return their number."""
        told, watch.to_tell = watch.to_tell, None
        if told is not None:
            self._own.compare_set(self._key(watch, _FAILURE), "", told)
        suspects = watch.suspects and not watch.is_suspicious
        if suspects:
            self._own.set(self._key(watch, _SUSPICION), "")
        return int(told is not None) + int(suspects)

    def _read_news(self, watch: Watch) -> None:
        store, ring, failure = self._own, watch.ring, self._key(watch, _FAILURE)
        watch.is_suspicious = store.check([self._key(watch, _SUSPICION)])
        has_heard = watch.failure is not None
        if watch.failure is None and store.check([failure]):
            told = json.loads(store.get(failure))
            watch.failed_rank, watch.failure = told["rank"], told["reason"]
        gone = None if ring.bulletin is None else ring.bulletin.find_gone()
        if watch.failure is None and gone is not None:
            watch.failed_rank, watch.failure = gone
        if watch.failure is not None:
            watch.wakes_judge.set()
            if not has_heard:
                store.add(self._key(watch, _HEARD), 1)
        if ring.rank != 0 and store.check([self._key(watch, _SERVER_LEFT)]):
            self._see_server_leave(watch)

    def _watch_peer(self, watch: Watch) -> None:
        """Watch the next rank that hasn't ended normally."""
        numbers = watch.ring.numbers
        while watch.peer != watch.ring.rank:
            number = numbers[watch.peer]
            beats = self._own.add(self._beat(number), 0)
            if beats < _GONE:
                watch.peer_silence_s = self._look_at(number, beats)
                return
            watch.peer = (watch.peer + 1) % len(numbers)
        watch.peer_silence_s = 0.0

    def _watch_further(self, watch: Watch) -> None:
        """While the watched rank is silent, also watch the ranks behind it."""
        if watch.peer_silence_s <= _SILENT_ROUNDS * self.interval_s:
            return
        numbers = watch.ring.numbers
        for step in range(1, min(_OF_A_NODE, len(numbers) - 1)):
            rank = (watch.peer + step) % len(numbers)
            if rank != watch.ring.rank:
                self._look_at(numbers[rank], self._own.add(self._beat(numbers[rank]), 0))

    def _look_at(self, number: int, beats: int) -> float:
        with self._lock:
            if number not in self._silences:
                self._silences[number] = Silence(2 * self.interval_s, sign=beats)
            return self._silences[number].look(beats)

    def _say_goodbye(self) -> None:
        store, watch = self._own, self._watch
        store.add(self._beat(self.number), _GONE)
        if watch is None:
            return
        if watch.ring.rank != 0:
            self._see_server_leave(watch)
            return
        store.set(self._key(watch, _SERVER_LEFT), "")
        store.add(self._key(watch, _NEWS), 1)
        patience_s, num_others = 8 * self.interval_s, len(watch.ring.numbers) - 1
        deadline = Deadline(patience_s if watch.failure is None else 0.0)
        while store.add(self._key(watch, "saw"), 0) < num_others and not deadline.is_over:
            time.sleep(self.interval_s / 20)

    def _see_server_leave(self, watch: Watch) -> None:
        if not watch.has_server_left:
            watch.has_server_left = True
            self._own.add(self._key(watch, "saw"), 1)

    def _beat(self, number: int) -> str:
        return f"beat/{self._start or 1}/{number}"

    def _key(self, watch: Watch, word: str) -> str:
        return f"{watch.ring.name}/{self._start or 1}/{word}"
