"""Tell other ranks, and hear from them, through the store on a thread of its own.

A call to a store whose server is frozen never returns, and nothing can cancel it. So this thread
alone makes calls, and the others read what it has heard, and whether it still hears anything.

A round is three calls, each to add to a number of the store, at any number of ranks: the rank's own
beats, how many news there are, and the beats of the rank that it watches. Only news are looked at
more closely. Rounds follow each other quickly once a connection has broken, until it is known why.
Who says goodbye leaves the number of the rank that it watched, which is watched by its watcher from
then on: nobody walks over all those that have gone.
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
"""More than any rank's beats; who ends adds it 1 + r times, where r is the rank that it watched."""
_QUICKLY_S, _MOST_CALLS_PER_S = 0.01, 30_000
"""Between two rounds of a rank that has lost a connection; and what the store gets of all ranks."""
_MAX_HOPS = 64
"""From a rank that has gone to the one that it watched, in one round; seldom more than one."""


class Silence:
    """How long something has shown no sign of life, as far as this process was awake to see.

    Args:
        nap_s: What a gap between two looks counts at most: a process that was stopped itself, or
            got no time on a busy machine, knows nothing of the others.
        sign: The last sign of life, if one is known.
        seconds: The silence since then that was counted before.
    """

    def __init__(self, nap_s: float, *, sign: object = None, seconds: float = 0.0) -> None:
        self._nap_s = nap_s
        self.sign = sign
        """The last sign of life."""
        self._looked_at_s = time.monotonic()
        self.seconds = seconds
        """The silence so far."""

    def look(self, sign: object) -> float:
        """Return the silence; a sign that has changed ends it."""
        now_s = time.monotonic()
        gap_s = min(now_s - self._looked_at_s, self._nap_s)
        self.seconds = 0.0 if sign != self.sign else self.seconds + gap_s
        self.sign, self._looked_at_s = sign, now_s
        return self.seconds


class Bulletin(Protocol):
    """Where others than ranks say that one is gone, such as whoever started it."""

    @property
    def patience_s(self) -> float:
        """How long the others wait for a rank that beats, once one is gone."""

    def num_news(self) -> int:
        """Return a number that grows with each news; one call of a store."""

    def find_gone(self) -> tuple[int, str] | None:
        """Return a rank that is gone, and why; None if nobody is."""


class Heartbeat:
    """One rank's line to the store, from its making until `end` says goodbye.

    All ranks make as many of them: the n-th ones of a store belong together.

    Args:
        store: The run's store; the thread talks to it over a connection of its own.
        global_rank: This rank.
        world_size: Number of ranks.
        interval_s: Seconds between two rounds of telling and hearing.
        bulletin: Looked at in every round, if there is one.
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
        """Why the run ends: the first failure that any rank has told."""
        self.failed_rank = -1
        """The rank that it is about, which may be dead."""
        self.num_readers = 0
        """On rank 0: how many other ranks, without the failed one, have read it."""
        self.is_suspicious = False
        """Whether some rank has lost a connection, so that silence means more than usual."""
        self.has_begun = threading.Event()
        """Set once the store has answered."""
        self.wakes_judge = threading.Event()
        """Set once there is a failure, or nobody judges what this hears any more."""
        self.num_rounds = 0
        """Rounds in which the store has answered."""
        self.is_store_gone = False
        """Whether the store has closed the connection."""
        self.has_server_left = False
        """Whether rank 0 has said goodbye: the store goes with it, and no harm is done."""
        self._num_news = 0
        self.peer = (global_rank + 1) % world_size
        """The next rank that hasn't said goodbye; this one where there is none."""
        self.peer_beat = 0
        """How often that rank has shown that it lives."""
        self.peer_silence = Silence(2 * interval_s)
        """How long it has shown nothing, as far as anybody has looked."""
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
        """Return how long the rank that is watched has been silent."""
        return self.peer_silence.look((self.peer, self.peer_beat))

    def silence_since(self, global_rank: int, beats: int) -> float:
        """Return for how long a rank was seen to be silent after it had beaten so often."""
        known = self.peer_silence.sign == (global_rank, beats)
        return self.peer_silence.seconds if known else 0.0

    def beats_of(self, global_rank: int) -> int:
        """Return how often a rank has beaten; for another thread, and only where a store answers.

        More than any rank's beats where it has said goodbye.
        """
        return int(self._store.add(_beat(global_rank), 0))

    def end(self, timeout_s: float) -> None:
        """Say goodbye, so that nobody misses this rank; wait so long for the store to hear it."""
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
        """Return how long to wait for the next round."""
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
        self.num_rounds += 1

    def _tell(self) -> int:
        """Write down what this rank has to tell; returns how many news that makes."""
        told, self._to_tell = self._to_tell, None
        if told is not None:
            self._store.compare_set(_FAILURE, "", told)
        suspects = self._suspects and not self.is_suspicious
        if suspects:
            self._store.set(_SUSPICION, "")
        return int(told is not None) + int(suspects)

    def _look(self) -> None:
        """See what is new."""
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
        """Return whom this rank watches now, and that rank's beats."""
        peer, beat = self.peer, 0
        for _ in range(_MAX_HOPS):
            if peer == self._rank:
                return peer, own_beat
            beat = self._store.add(_beat(peer), 0)
            if beat < _GONE:
                break
            peer = beat // _GONE - 1
        return peer, beat


def sign_of_life(store: Store, global_rank: int) -> tuple[int, int]:
    """Return what changes as long as a rank of a run beats, for others than its ranks.

    Args:
        store: The run's; see `Heartbeat`.
        global_rank: The rank.
    """
    start = store.add(_starts(global_rank), 0)
    return start, PrefixStore(f"heartbeat/{start}", store).add(_beat(global_rank), 0)


def _starts(global_rank: int) -> str:
    return f"starts/{global_rank}"


def _beat(global_rank: int) -> str:
    return f"beat/{global_rank}"
