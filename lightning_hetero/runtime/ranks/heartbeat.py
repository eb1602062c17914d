"""Exchange heartbeats and news with other ranks, through the store, on a thread of its own.

A call to a store whose server is frozen never returns and can't be cancelled. So only this thread
makes calls; others read what it has received, and whether it still receives anything.

A round is three calls, each an addition to a number in the store, for any number of ranks: the
rank's own beats, the number of news, and the beats of the rank that it watches. Only if there are
news, or that rank is silent, it reads more: a node's ranks are lost together, and with them who
would have watched all but the first. Rounds follow each other quickly once a connection has broken,
until it is known why. A rank that says goodbye leaves the number of the rank that it watched, which
its own watcher then watches: so nobody has to skip over all ranks that have gone.
"""

import json
import math
import threading
import time
from typing import Protocol

from torch.distributed.distributed_c10d import PrefixStore, Store

__all__ = ["Bulletin", "Heartbeat", "Silence", "sign_of_life"]

_FAILURE, _NEWS, _SERVER_LEFT, _SUSPICION = "failure", "news", "server left", "suspicion"
_GONE = 2**32
"""More than any rank's beats; a rank that ends adds it 1 + r times, r being the rank it watched."""
_QUICKLY_S, _MOST_CALLS_PER_S = 0.01, 30_000
"""Seconds between rounds after a connection has broken; and most calls per second of all ranks."""
_MAX_HOPS = 64
"""Most gone ranks that are skipped in one round; seldom more than one."""
_OF_A_NODE = 16
"""Ranks that are watched once the first of them is silent: a node's ranks are lost together."""
_SILENT_ROUNDS = 1.5
"""Rounds without a beat after which a rank is silent."""


class Silence:
    """Measures for how long something shows no sign of life, while this process was awake to see.

    Args:
        nap_s: The most that a gap between two looks counts: a process that was stopped itself, or
            got no time on a busy machine, has seen nothing of the others.
        sign: The last sign of life, if one is known.
        seconds: Silence since then that was counted earlier.
    """

    def __init__(self, nap_s: float, *, sign: object = None, seconds: float = 0.0) -> None:
        self._nap_s = nap_s
        self.sign = sign
        """The last sign of life."""
        self._looked_at_s = time.monotonic()
        self.seconds = seconds
        """Seconds of silence so far."""

    def look(self, sign: object) -> float:
        """Take in the present sign; return the seconds of silence, 0 if the sign has changed."""
        now_s = time.monotonic()
        gap_s = min(now_s - self._looked_at_s, self._nap_s)
        self.seconds = 0.0 if sign != self.sign else self.seconds + gap_s
        self.sign, self._looked_at_s = sign, now_s
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


class Heartbeat:
    """One rank's connection to the store, from its making until `end` says goodbye.

    All ranks make equally many: the n-th ones in a store belong together.

    Args:
        store: The run's store; the thread talks to it over a connection of its own.
        global_rank: This rank.
        world_size: Number of ranks.
        interval_s: Seconds between two rounds.
        bulletin: Checked in every round, if there is one.
    """

    def __init__(
        self,
        store: Store,
        *,
        global_rank: int,
        world_size: int,
        interval_s: float,
        bulletin: Bulletin | None = None,
    ) -> None:
        self._store = store
        self._bulletin = bulletin
        self._rank = global_rank
        self._world_size = world_size
        self._interval_s = interval_s
        self._wake = threading.Event()
        self._has_ended = threading.Event()
        self._is_ending = False
        self._to_tell: str | None = None
        self._suspects = False
        self._suspected_at_s = -math.inf
        self.failure: str | None = None
        """Why the run ends: the first failure that any rank has reported; None if none has."""
        self.failed_rank = -1
        """The rank that has failed, which may be dead."""
        self.num_readers = 0
        """On rank 0: the number of other ranks, without the failed one, that have read it."""
        self.is_suspicious = False
        """Whether any rank has lost a connection, so that silence counts sooner."""
        self.has_begun = threading.Event()
        """Set once the store has answered."""
        self.wakes_judge = threading.Event()
        """Set once there is a failure, or nobody watches any more."""
        self.num_rounds = 0
        """Number of rounds in which the store has answered."""
        self.is_store_gone = False
        """Whether the store has closed the connection."""
        self.has_server_left = False
        """Whether rank 0 has said goodbye: then the store may go without harm."""
        self._num_news = 0
        self.peer = (global_rank + 1) % world_size
        """The watched rank: the next one that hasn't said goodbye; this rank if there is none."""
        self.peer_beat = 0
        """Number of that rank's heartbeats."""
        self.peer_silence = Silence(2 * interval_s)
        """That rank's silence, as of the last look."""
        self._further: dict[int, Silence] = {}
        """The silence of each rank that follows it, while it is silent; nobody else may watch."""
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def tell(self, failed_rank: int, reason: str) -> None:
        """Tell the others that a rank has failed; the first failure told by any rank counts."""
        self._to_tell = json.dumps({"rank": failed_rank, "reason": reason})
        self._wake.set()

    def suspect(self) -> None:
        """Tell the others that a connection has broken, so somebody may be dead."""
        self._suspected_at_s = time.monotonic()
        self._suspects = True
        self._wake.set()

    def look_at_peer(self) -> float:
        """Return the seconds for which the watched rank has been silent."""
        return self.peer_silence.look((self.peer, self.peer_beat))

    def silence_since(self, global_rank: int, beats: int) -> float:
        """Return the seconds for which a rank was seen to be silent after `beats` heartbeats."""
        for silence in (self.peer_silence, self._further.get(global_rank)):
            if silence is not None and silence.sign == (global_rank, beats):
                return silence.seconds
        return 0.0

    def beats_of(self, global_rank: int) -> int:
        """Return a rank's number of heartbeats; called by another thread while the store answers.

        If the rank has said goodbye, it is larger than any number of beats.
        """
        return int(self._store.add(_beat(global_rank), 0))

    def end(self, timeout_s: float) -> None:
        """Say goodbye, so that nobody misses this rank; wait `timeout_s` at most for the store."""
        self._is_ending = True
        self._wake.set()
        self._has_ended.wait(timeout_s)

    def _run(self) -> None:
        try:
            own = self._store.clone()  # type: ignore[attr-defined]
            self._store = PrefixStore(f"heartbeat/{own.add(_starts(self._rank), 1)}", own)
            while not self._is_ending:
                self._round()
                self.has_begun.set()
                self._wake.wait(self._pause_s())
                self._wake.clear()
            self._say_goodbye()
        except Exception:
            # The client's own errors have many types, and the process may be half torn down.
            self.is_store_gone = True
        self._has_ended.set()

    def _pause_s(self) -> float:
        """Return the seconds until the next round."""
        # Silence is judged after as long; what is said of a dead process is there within moments.
        is_over = time.monotonic() - self._suspected_at_s > 6 * self._interval_s
        if is_over or self.failure is not None:
            return self._interval_s
        quickly_s = max(_QUICKLY_S, 3 * self._world_size / _MOST_CALLS_PER_S)
        return min(quickly_s, self._interval_s)

    def _say_goodbye(self) -> None:
        """Rank 0 stays, for a moment, until the others know that the store goes without harm."""
        self._store.add(_beat(self._rank), _GONE * (1 + self.peer))
        if self._rank != 0:
            self._see_server_leave()
            return
        self._store.set(_SERVER_LEFT, "")
        self._store.add(_NEWS, 1)
        patience_s, num_others = 8 * self._interval_s, self._world_size - 1
        deadline_s = time.monotonic() + (patience_s if self.failure is None else 0.0)
        while self._store.add("saw", 0) < num_others and time.monotonic() < deadline_s:
            time.sleep(self._interval_s / 20)

    def _see_server_leave(self) -> None:
        if not self.has_server_left:
            self.has_server_left = True
            self._store.add("saw", 1)

    def _round(self) -> None:
        store = self._store
        beat = store.add(_beat(self._rank), 1)
        num_news = store.add(_NEWS, self._tell())
        if self._bulletin is not None:
            num_news += self._bulletin.num_news()
        if num_news != self._num_news:
            self._num_news = num_news
            self._look()
        if self.failure is not None and self._rank == 0:
            self.num_readers = store.add("readers", 0)
        peer, self.peer_beat = self._watch(beat)
        self.peer = peer
        self._watch_further()
        self.num_rounds += 1

    def _tell(self) -> int:
        """Write this rank's news into the store; return their number."""
        told, self._to_tell = self._to_tell, None
        if told is not None:
            self._store.compare_set(_FAILURE, "", told)
        suspects = self._suspects and not self.is_suspicious
        if suspects:
            self._store.set(_SUSPICION, "")
        return int(told is not None) + int(suspects)

    def _look(self) -> None:
        """Read the news from the store."""
        store = self._store
        self.is_suspicious = store.check([_SUSPICION])
        if self.failure is None and store.check([_FAILURE]):
            failure = json.loads(store.get(_FAILURE))
            self.failed_rank, self.failure = failure["rank"], failure["reason"]
            store.add("readers", int(self._rank not in (0, self.failed_rank)))
        gone = None if self._bulletin is None else self._bulletin.find_gone()
        if self.failure is None and gone is not None:
            self.failed_rank, self.failure = gone
        if self.failure is not None:
            self.wakes_judge.set()
        if self._rank != 0 and store.check([_SERVER_LEFT]):
            self._see_server_leave()

    def _watch(self, own_beat: int) -> tuple[int, int]:
        """Return the rank to watch now, and its number of beats."""
        peer, beat = self.peer, 0
        for _ in range(_MAX_HOPS):
            if peer == self._rank:
                return peer, own_beat
            beat = self._store.add(_beat(peer), 0)
            if beat < _GONE:
                break
            peer = beat // _GONE - 1
        return peer, beat

    def _watch_further(self) -> None:
        """While the watched rank is silent, watch those that follow, which it no longer may do."""
        silence, is_silent = self.peer_silence, False
        if silence.sign == (self.peer, self.peer_beat):
            is_silent = silence.seconds > _SILENT_ROUNDS * self._interval_s
        if not is_silent:
            self._further.clear()
            return
        # If the store is slow, all ranks seem silent to each other, and mustn't make it slower yet.
        most = int(_MOST_CALLS_PER_S * self._interval_s / self._world_size) - 3
        for step in range(1, min(_OF_A_NODE, self._world_size - 1, most + 1)):
            rank = (self.peer + step) % self._world_size
            if rank != self._rank:
                sign = rank, self.beats_of(rank)
                silence = self._further.setdefault(rank, Silence(2 * self._interval_s, sign=sign))
                silence.look(sign)


def sign_of_life(store: Store, global_rank: int) -> tuple[int, int]:
    """Return a value that changes as long as a rank sends heartbeats; for others than its ranks.

    Args:
        store: The run's store; see `Heartbeat`.
        global_rank: The rank.
    """
    start = store.add(_starts(global_rank), 0)
    return start, PrefixStore(f"heartbeat/{start}", store).add(_beat(global_rank), 0)


def _starts(global_rank: int) -> str:
    return f"starts/{global_rank}"


def _beat(global_rank: int) -> str:
    return f"beat/{global_rank}"
