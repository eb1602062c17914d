"""Send this process's heartbeat, and hear of other processes: whether they are silent, or failed.

A heartbeat is a counter in the run's store, one for each process. The process increases it as long
as others may wait for it: as a rank of one generation after another, as a member that agrees on the
next generation, and as a joiner. `silence_s` returns for how long a counter hasn't changed; it is
used wherever one process needs to know whether another one is alive.

Ranks that train together form a `Ring`, in which each watches the next ones: as many as a node has,
since the ranks of a node are lost together. A round takes three calls of the store, whatever the
number of ranks: increase the own counter, read the number of news, and read the counters of the
watched ranks. More is read only if there are news. Once a connection has broken, rounds follow each
other quickly until the reason is known.

A call to a store whose server is frozen never returns and can't be cancelled. So a thread makes
these calls; other threads read what it has found, and whether it still gets answers.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from lightning_hetero.core.process import Deadline

NEWS = "news"
"""Key of a counter; after an increase each rank reads whether one has failed."""
_END, _HEARD, _SUSPICION = "end", "heard", "suspicion"
_ENDED = 2**32
"""Larger than any number of heartbeats; a process that ends adds it to its counter."""
_OF_A_NODE = 16
"""Number of ranks that each rank watches: about those of a node."""


def interval_s(silence_s: float) -> float:
    """Return the seconds between two beats if a process counts as lost after `silence_s`."""
    return min(0.5, silence_s / 10)


class Silence:
    """Measures for how long something has shown no sign of life, in time that this process ran.

    Args:
        nap_s: Largest number of seconds that count between two checks. More seconds mean that this
            process was stopped itself, or got no time on a busy machine, and saw nothing meanwhile.
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


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Processes that train together and watch each other."""

    numbers: tuple[int, ...]
    """For each rank the number of its process, which names its counter."""
    rank: int
    """The rank of this process."""
    name: str = "ring"
    """Prefix of the ring's keys in the store; different for each ring of the run."""
    find_gone: Callable[[], tuple[int, str] | None] | None = None
    """Returns a rank that is recorded as gone, and why; None if ranks don't outlive others: then
    rank 0 may serve the store."""
    patience_s: float = 10.0
    """Seconds that others wait for a rank that is alive, once another rank is gone."""

    @property
    def watched(self) -> tuple[int, ...]:
        """The ranks that this one watches."""
        count = len(self.numbers)
        return tuple((self.rank + k) % count for k in range(1, min(_OF_A_NODE, count - 1) + 1))


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
        self.has_server_left = False
        """Whether rank 0 has ended normally; then the loss of the store isn't a failure."""
        self.is_suspicious = False
        """Whether any rank has lost a connection; then silent ranks count as dead sooner."""
        self.wakes_judge = threading.Event()
        """Set when there is a failure, or when watching ends: the judging thread then continues."""
        self.silences_s: dict[int, float] = {}
        """For each watched rank that hasn't ended normally, its seconds of silence."""
        self.num_news: int | None = None
        self.to_tell: tuple[int, str] | None = None
        self.suspects = False


class Heartbeat:
    """One process's heartbeat, from `begin` to `end`; may begin again.

    All processes of a run must begin the same number of times, because their n-th counters belong
    together.

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
        self.num_news = 0
        """Number of news in the last round."""
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
            self._watch.to_tell = failed_rank, reason
        self._wake.set()

    def suspect(self) -> None:
        """Tell the others that a connection has broken, so that a rank may be dead."""
        self._suspected_at_s = time.monotonic()
        if self._watch is not None:
            self._watch.suspects = True
        self._wake.set()

    def wait_until_heard(self, timeout_s: float) -> None:
        """Wait until each rank knows how the ring has ended, for at most `timeout_s`."""
        if self._watch is not None:
            with suppress(DistError):  # Without the store nobody can be told.
                self._wait_until_heard(self._store, self._watch, timeout_s)

    def silences_s(self, numbers: Sequence[int]) -> list[float]:
        """Return for how many seconds each process was seen to be silent; one call of a store.

        Exactly 0 means that it has beaten since the last look.
        """
        beats = self._read_beats(self._store, numbers)
        return [self._look_at(number, count) for number, count in zip(numbers, beats, strict=True)]

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
            is_last = False
            while not is_last:
                is_last = self._is_ending  # What this rank has told by now is written first.
                self._round()
                self.has_begun.set()
                if not is_last:
                    self._wake.wait(self._pause_s())
                    self._wake.clear()
            self._report_end()
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
        self.num_news = int(self._own.add(NEWS, 0 if watch is None else self._tell(watch)))
        if watch is not None:
            if self.num_news != watch.num_news:
                self._read_news(watch)
            self._look_around(watch)
        self.num_rounds += 1

    def _tell(self, watch: Watch) -> int:
        """Write this rank's news into the store; return their number."""
        told, watch.to_tell = watch.to_tell, None
        if told is not None:
            self._own.compare_set(self._key(watch, _END), "", json.dumps(told))
        suspects = watch.suspects and not watch.is_suspicious
        if suspects:
            self._own.set(self._key(watch, _SUSPICION), "")
        return int(told is not None) + int(suspects)

    def _read_news(self, watch: Watch) -> None:
        watch.num_news = self.num_news
        watch.is_suspicious = self._own.check([self._key(watch, _SUSPICION)])
        if watch.failure is None and not watch.has_server_left:
            self._read_end(watch)
        if watch.failure is not None:
            watch.wakes_judge.set()

    def _read_end(self, watch: Watch) -> None:
        """Read whether a rank has failed, or rank 0 has ended, and confirm it."""
        end, find_gone = self._key(watch, _END), watch.ring.find_gone
        if self._own.check([end]):
            found = json.loads(self._own.get(end))
        else:
            found = None if find_gone is None else find_gone()
        if found is not None:
            watch.failed_rank, watch.failure = found
            watch.has_server_left = watch.failure is None
            self._own.add(self._key(watch, _HEARD), 1)

    def _look_around(self, watch: Watch) -> None:
        """Look at the watched ranks, apart from those that have ended normally."""
        ranks, numbers = watch.ring.watched, watch.ring.numbers
        beats = self._read_beats(self._own, [numbers[rank] for rank in ranks])
        watch.silences_s = {
            rank: self._look_at(numbers[rank], count)
            for rank, count in zip(ranks, beats, strict=True)
            if count < _ENDED
        }

    def _read_beats(self, store: Store, numbers: Sequence[int]) -> list[int]:
        """Return the processes' counters; one call of a store if all were watched before."""
        keys = [self._beat(number) for number in numbers]
        is_first = any(number not in self._silences for number in numbers)
        if is_first and not store.check(keys):
            for key in keys:  # A read would wait for a counter that doesn't exist.
                store.add(key, 0)
        return [int(count) for count in store.multi_get(keys)] if keys else []

    def _look_at(self, number: int, beats: int) -> float:
        with self._lock:
            if number not in self._silences:
                self._silences[number] = Silence(2 * self.interval_s, sign=beats)
            return self._silences[number].look(beats)

    def _report_end(self) -> None:
        store, watch = self._own, self._watch
        store.add(self._beat(self.number), _ENDED)
        if watch is None or watch.failure is not None:
            return
        if watch.ring.rank == 0:
            store.compare_set(self._key(watch, _END), "", json.dumps([0, None]))
            store.add(NEWS, 1)
        if not watch.has_server_left:
            store.add(self._key(watch, _HEARD), 1)
        if watch.ring.rank == 0:
            self._wait_until_heard(store, watch, 8 * self.interval_s)

    def _wait_until_heard(self, store: Store, watch: Watch, timeout_s: float) -> None:
        key, deadline = self._key(watch, _HEARD), Deadline(timeout_s)
        while store.add(key, 0) < len(watch.ring.numbers) and not deadline.is_over:
            time.sleep(self.interval_s / 20)

    def _beat(self, number: int) -> str:
        return f"beat/{self._start or 1}/{number}"

    def _key(self, watch: Watch, word: str) -> str:
        return f"{watch.ring.name}/{self._start or 1}/{word}"
