"""One beat per process: how others know that it lives, and what it hears of them.

From the moment in which others may wait for it until it ends, each process adds to a number of its
own in the run's store: as a rank of one generation after another, as a member that agrees on the
next one, and as a joiner that waits to be let in. Whoever asks whether a process lives reads that
number: `silence_s` is the one measure of silence, and what it has seen counts for all who ask.

Ranks that train together form a `Ring`: each watches the next one. A round is three calls of the
store for any number of ranks, each an addition: the own beat, the number of news, and the beat of
the watched rank. Only if there are news, or that rank is silent, it reads more: a node's ranks are
lost together, and with them who would have watched all but the first. Rounds follow each other
quickly once a connection has broken, until it is known why.

A call to a store whose server is frozen never returns and can't be cancelled. So a thread makes
these calls; others read what it has heard, and whether it still hears anything.
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
"""More than any process's beats; a process that ends adds it."""
_OF_A_NODE = 16
"""Ranks that are watched once the first of them is silent: a node's ranks are lost together."""
_SILENT_ROUNDS = 1.5
"""Rounds without a beat after which a rank is silent."""


def interval_s(silence_s: float) -> float:
    """Return the seconds between two beats of a process that may be silent for `silence_s`."""
    return min(0.5, silence_s / 10)


class Silence:
    """Measures for how long something shows no sign of life, while this process was awake to see.

    Args:
        nap_s: The most that a gap between two looks counts: a process that was stopped itself, or
            got no time on a busy machine, has seen nothing of the others.
        sign: The last sign of life, if one is known.
    """

    def __init__(self, nap_s: float, *, sign: object = None) -> None:
        self._nap_s = nap_s
        self._sign = sign
        self._looked_at_s = time.monotonic()
        self.seconds = 0.0
        """Seconds of silence so far."""

    def look(self, sign: object) -> float:
        """Take in the present sign; return the seconds of silence, 0 if the sign has changed."""
        now_s = time.monotonic()
        gap_s = min(now_s - self._looked_at_s, self._nap_s)
        self.seconds = 0.0 if sign != self._sign else self.seconds + gap_s
        self._sign, self._looked_at_s = sign, now_s
        return self.seconds


class Bulletin(Protocol):
    """Tells of ranks that are gone, from others than ranks, such as a worker's keeper."""

    @property
    def patience_s(self) -> float:
        """Seconds for which the others wait for a rank that is alive, once one is gone."""

    def num_news(self) -> int:
        """Return a number that grows with each news; one call of a store."""

    def find_gone(self) -> tuple[int, str] | None:
        """Return a rank that is gone, and why; None if none is."""


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Processes that train together and watch each other."""

    numbers: tuple[int, ...]
    """By rank: the number under which a process beats."""
    rank: int
    """This process's."""
    name: str = "ring"
    """Begins the names of its news in the store; no other ring of the run has it."""
    bulletin: Bulletin | None = None
    """Read in every round, if there is one."""


class Watch:
    """What a process has heard of its ring: written by its heartbeat's thread, read by the judge.

    Args:
        ring: The ring.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.failure: str | None = None
        """Why the run ends: the first failure that any rank has reported; None if none has."""
        self.failed_rank = -1
        """The rank that has failed, which may be dead."""
        self.is_suspicious = False
        """Whether any rank has lost a connection, so that silence counts sooner."""
        self.wakes_judge = threading.Event()
        """Set once there is a failure, or nobody watches any more."""
        self.has_server_left = False
        """Whether rank 0 has said goodbye: then the store may go without harm."""
        self.peer = (ring.rank + 1) % len(ring.numbers)
        """The watched rank: the next one that hasn't said goodbye; this rank if there is none."""
        self.peer_silence_s = 0.0
        """For how long that rank has been silent."""
        self.num_news = 0
        self.to_tell: str | None = None
        self.suspects = False


class Heartbeat:
    """One process's beats, from `begin` until `end` says goodbye; may begin again.

    Processes begin equally often: the n-th beats in a store belong together.

    Args:
        store: The run's store; the thread talks to it over a connection of its own.
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
        """By number of a process, all that are or were watched."""
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
        """Begin to beat, unless this process does already."""
        if self._thread is None:
            self._is_ending = self.is_store_gone = False
            self._watch, self._silences = None, {}
            self.has_begun.clear()
            self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self._thread.start()

    def watch(self, ring: Ring) -> Watch:
        """From now on, watch another ring; return what is heard of it."""
        self._watch = watch = Watch(ring)
        self._suspected_at_s = -math.inf
        self._wake.set()
        return watch

    def tell(self, failed_rank: int, reason: str) -> None:
        """Tell the others that a rank has failed; the first failure told by any rank counts."""
        if self._watch is not None:
            self._watch.to_tell = json.dumps({"rank": failed_rank, "reason": reason})
        self._wake.set()

    def wait_until_heard(self, timeout_s: float) -> None:
        """Wait until each rank has heard which one has failed, `timeout_s` at most."""
        watch, deadline = self._watch, Deadline(timeout_s)
        if watch is None:
            return
        key, num_ranks = self._key(watch, _HEARD), len(watch.ring.numbers)
        with suppress(DistError):  # Without the store nobody hears anything.
            while self._store.add(key, 0) < num_ranks and not deadline.is_over:
                time.sleep(self.interval_s / 20)

    def suspect(self) -> None:
        """Tell the others that a connection has broken, so somebody may be dead."""
        self._suspected_at_s = time.monotonic()
        if self._watch is not None:
            self._watch.suspects = True
        self._wake.set()

    def beats_of(self, number: int) -> int:
        """Return a process's number of beats so far; one call of the store, by any thread.

        If the process has said goodbye, it is larger than any number of beats.
        """
        return int(self._store.add(self._beat(number), 0))

    def silence_s(self, number: int) -> float:
        """Return the seconds for which a process was seen to be silent; one call of the store."""
        return self._look_at(number, self.beats_of(number))

    def end(self, timeout_s: float) -> None:
        """Say goodbye, so that nobody misses this process; wait `timeout_s` at most for the store.

        Rank 0 stays, for a moment, until the others know that the store goes without harm.
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
            # The client's own errors have many types, and the process may be half torn down.
            self.is_store_gone = True

    def _pause_s(self) -> float:
        """Return the seconds until the next round."""
        watch = self._watch
        # Silence is judged after as long; what is said of a dead process is there within moments.
        is_over = time.monotonic() - self._suspected_at_s > 6 * self.interval_s
        if watch is None or is_over or watch.failure is not None:
            return self.interval_s
        # All ranks together ask the store no oftener than they would at a hundred ranks.
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
        """Watch the next rank; of those that have said goodbye each is passed over once."""
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
        """While the watched rank is silent, watch those that follow, which it no longer may do."""
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
