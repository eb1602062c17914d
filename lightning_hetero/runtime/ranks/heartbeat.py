"""Tell other ranks, and hear from them, through the store on a thread of its own.

A call to a store whose server is frozen never returns, and nothing can cancel it. So this thread
alone makes calls, and the others read what it has heard, and whether it still hears anything.
"""

import json
import threading
import time

from torch.distributed.distributed_c10d import PrefixStore, Store

__all__ = ["Heartbeat", "Silence"]

_FAILURE = "failure"


class Silence:
    """How long something has shown no sign of life, as far as this process was awake to see.

    Args:
        nap_s: What a gap between two looks counts at most: a process that was stopped itself, or
            got no time on a busy machine, knows nothing of the others.
    """

    def __init__(self, nap_s: float) -> None:
        self._nap_s = nap_s
        self._sign: object = None
        self._looked_at_s = time.monotonic()
        self.seconds = 0.0
        """The silence so far."""

    def look(self, sign: object) -> float:
        """Return the silence; a sign that has changed ends it."""
        now_s = time.monotonic()
        gap_s = min(now_s - self._looked_at_s, self._nap_s)
        self.seconds = 0.0 if sign != self._sign else self.seconds + gap_s
        self._sign, self._looked_at_s = sign, now_s
        return self.seconds


class Heartbeat:
    """One rank's line to the store, from its making until `end` says goodbye.

    All ranks make as many of them: the n-th ones of a store belong together.

    Args:
        store: The run's store; the thread talks to it over a connection of its own.
        global_rank: This rank.
        world_size: Number of ranks.
        interval_s: Seconds between two rounds of telling and hearing.
    """

    def __init__(
        self, store: Store, *, global_rank: int, world_size: int, interval_s: float
    ) -> None:
        self._store = store
        self._rank = global_rank
        self._world_size = world_size
        self._interval_s = interval_s
        self._wake = threading.Event()
        self._has_ended = threading.Event()
        self._is_ending = False
        self._to_tell: str | None = None
        self._suspects = False
        self.failure: str | None = None
        """Why the run ends: the first failure that any rank has told."""
        self.failed_rank = -1
        """The rank that it is about, which may be dead."""
        self.num_readers = 0
        """On rank 0: how many other ranks, without the failed one, have read it."""
        self.is_suspicious = False
        """Whether some rank has lost a connection, so that silence means more than usual."""
        self.num_rounds = 0
        """Rounds in which the store has answered."""
        self.is_store_gone = False
        """Whether the store has closed the connection."""
        self.has_server_left = False
        """Whether rank 0 has said goodbye: the store goes with it, and no harm is done."""
        self.peer = global_rank
        """The next rank that hasn't said goodbye; this one where there is none."""
        self.peer_beat = 0
        """How often that rank has shown that it lives."""
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def tell(self, failed_rank: int, reason: str) -> None:
        """Tell the others that a rank has failed; the first failure told by any rank counts."""
        self._to_tell = json.dumps({"rank": failed_rank, "reason": reason})
        self._wake.set()

    def suspect(self) -> None:
        """Tell the others that a connection has broken, so somebody may be dead."""
        self._suspects = True
        self._wake.set()

    def end(self, timeout_s: float) -> None:
        """Say goodbye, so that nobody misses this rank; wait so long for the store to hear it."""
        self._is_ending = True
        self._wake.set()
        self._has_ended.wait(timeout_s)

    def _run(self) -> None:
        try:
            own = self._store.clone()  # type: ignore[attr-defined]
            self._store = PrefixStore(f"heartbeat/{own.add(f'starts/{self._rank}', 1)}", own)
            while not self._is_ending:
                self._round()
                self._wake.wait(self._interval_s)
                self._wake.clear()
            self._say_goodbye()
        except Exception:
            # The client's own errors have many types, and the process may be half torn down.
            self.is_store_gone = True
        self._has_ended.set()

    def _say_goodbye(self) -> None:
        """Rank 0 stays, for a moment, until the others know that the store goes without harm."""
        self._store.add(f"done/{self._rank}", 1)
        if self._rank != 0:
            self._see_server_leave()
            return
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
        beat = store.add(f"beat/{self._rank}", 1)
        told, self._to_tell = self._to_tell, None
        if told is not None:
            store.compare_set(_FAILURE, "", told)
        if self._suspects:
            store.set("suspicion", "")
        self.is_suspicious = store.check(["suspicion"])
        if self.failure is None and store.check([_FAILURE]):
            failure = json.loads(store.get(_FAILURE))
            self.failed_rank, self.failure = failure["rank"], failure["reason"]
            store.add("readers", int(self._rank not in (0, self.failed_rank)))
        if self.failure is not None and self._rank == 0:
            self.num_readers = store.add("readers", 0)
        if self._rank != 0 and store.check(["done/0"]):
            self._see_server_leave()
        peer = self._next_peer()
        self.peer_beat = beat if peer == self._rank else store.add(f"beat/{peer}", 0)
        self.peer = peer
        self.num_rounds += 1

    def _next_peer(self) -> int:
        for distance in range(1, self._world_size):
            peer = (self._rank + distance) % self._world_size
            if not self._store.check([f"done/{peer}"]):
                return peer
        return self._rank
