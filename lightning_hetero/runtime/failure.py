"""Find out that another rank failed, say which and why, and never hang because of it.

Every rank beats in the store and watches the next one. A rank that raises writes the reason into
the store first. What a rank then sees of it differs: gloo closes the connection of a peer that is
gone, NCCL just never returns. Both end the same way: the waiting rank raises `PeerError` with the
failed rank's reason, and a rank that can't even raise, because its main thread waits inside a
collective, is ended with that message and a non-zero exit code.
"""

import atexit
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_hetero.core.errors import HeteroError, PeerError

__all__ = ["EXIT_CODE", "LEAVE_EXIT_CODE", "AgreedExit", "FailureDetector", "connect_store"]

EXIT_CODE = 13
"""Exit code of a rank that the detector had to end."""

LEAVE_EXIT_CODE = 14
"""Exit code of ranks that end together to be started anew."""

_FAILURE = "failure"


class AgreedExit(SystemExit):
    """All ranks end after the same step: no rank has failed, and none needs to be told."""

    def __init__(self) -> None:
        super().__init__(LEAVE_EXIT_CODE)


def connect_store(
    address: str, port: int, *, global_rank: int, world_size: int, timeout: timedelta
) -> Store:
    """Return the run's key-value store; collective over all ranks.

    Under torchrun the agent may serve it, and it outlives the processes. Keys of a former start are
    still there then, so the ranks first agree on a prefix of their own.

    Raises:
        PeerError: The other ranks didn't come within the timeout.
    """
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        address,
        port,
        world_size,
        is_master=global_rank == 0 and not agent_serves,
        timeout=timeout,
        multi_tenant=True,
    )
    if not agent_serves:
        return PrefixStore("lightning_hetero", store)
    meeting = PrefixStore("lightning_hetero/meeting", store)
    name = _meet(meeting, global_rank, world_size, timeout.total_seconds())
    return PrefixStore(f"lightning_hetero/{name}", store)


def _meet(store: Store, global_rank: int, world_size: int, timeout_s: float) -> str:
    """Return a name that the ranks that live now agree on, whatever former ones have left.

    Each rank says a word that nobody has used. Rank 0 goes on answering with a name and the words
    it has heard, until all ranks have found their own word in the answer and confirmed the name.
    The agents' restart counts can't serve: they differ between nodes once one has joined later.
    """
    deadline = time.monotonic() + timeout_s
    word = uuid.uuid4().hex
    store.set(f"word/{global_rank}", word)
    answered = ""
    while time.monotonic() < deadline:
        if global_rank == 0:
            keys = [f"word/{rank}" for rank in range(1, world_size)]
            if all(store.check([key]) for key in keys):
                answer = json.dumps([word, [store.get(key).decode() for key in keys]])
                if answer != answered:
                    store.set("answer", answer)
                    answered = answer
            if store.add(f"confirmed/{word}", 0) == world_size - 1:
                return word
        elif store.check(["answer"]):
            name, heard = json.loads(store.get("answer"))
            if len(heard) == world_size - 1 and heard[global_rank - 1] == word:
                store.add(f"confirmed/{name}", 1)
                return str(name)
        time.sleep(0.01)
    raise PeerError(
        f"Rank {global_rank} of {world_size} waited {timeout_s:.0f} s for the others to start. If "
        "nodes have come or gone, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is "
        "started: some of its versions send restarted processes to a store that has moved."
    )


class FailureDetector:
    """One rank's watch over the others.

    Args:
        store: The run's store; the detector talks to it over a connection of its own.
        name: Keeps this detector's keys apart from others'; the same on all ranks.
        global_rank: This rank.
        world_size: Number of ranks.
        timeout: How long a rank may be silent before it counts as dead.
    """

    def __init__(
        self, store: Store, name: str, *, global_rank: int, world_size: int, timeout: timedelta
    ) -> None:
        self._store = PrefixStore(name, store.clone())  # type: ignore[attr-defined]
        self._rank = global_rank
        self._world_size = world_size
        self._timeout_s = timeout.total_seconds()
        self._interval_s = min(0.5, self._timeout_s / 10)
        self._grace_s = min(10.0, self._timeout_s)
        self._stopped = threading.Event()
        self._raised = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._reason: str | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Turn a peer's failure inside this context into `PeerError`, and report one's own."""
        try:
            yield
        except PeerError:
            raise
        except Exception as error:
            if not _is_broken_connection(error):
                self.report(error)
                raise
            self._raised.set()
            reason = self.explain()
            self._wait_until_seen()
            raise PeerError(reason) from error

    def start(self) -> None:
        """Begin to beat and to watch: from now on a silent peer is a dead one."""
        self._raised.clear()
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, args=(self._stopped,), name="failure-detector", daemon=True
        )
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Say goodbye: this rank ends, or goes on alone, without having failed."""
        atexit.unregister(self.stop)
        if not self._stopped.is_set():
            self._stopped.set()
            with suppress(Exception), self._lock:
                self._store.add(f"done/{self._rank}", 1)

    def report(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed; the first report of all counts."""
        self._raised.set()
        text = f"{type(error).__name__}: {error}"
        self._write_failure(self._rank, f"Rank {self._rank} failed: {text}")
        self._wait_until_seen()

    def _wait_until_seen(self) -> None:
        """Let rank 0, which serves the store, stay until the others have read why the run ends."""
        if self._rank != 0:
            return
        deadline = time.monotonic() + 8 * self._interval_s
        while time.monotonic() < deadline:
            with suppress(Exception), self._lock:
                if self._store.add("seen", 0) >= self._world_size - 1:
                    return
            time.sleep(self._interval_s / 5)

    def explain(self) -> str:
        """Return why a connection broke: waits until a failure is reported or a rank is silent."""
        beats, since = self._beats(), time.monotonic()
        patience_s = 6 * self._interval_s
        while time.monotonic() - since < min(self._timeout_s, 15.0):
            reason = self._read_failure()
            if reason is not None:
                return reason
            if time.monotonic() - since > patience_s:
                silent = [r for r, beat in self._beats().items() if beat == beats.get(r)]
                if silent:
                    return self._write_failure(silent[0], self._describe_silent(silent))
                beats, patience_s = self._beats(), patience_s + 6 * self._interval_s
            time.sleep(self._interval_s / 2)
        return (
            "A connection to another rank broke, and no rank said why. See the other ranks' logs."
        )

    # -- the watching thread --------------------------------------------------------------------

    def _watch(self, stopped: threading.Event) -> None:
        peer = (self._rank + 1) % self._world_size
        last_beat, last_change = -1, time.monotonic()
        while not stopped.wait(self._interval_s):
            reason = self._read_failure()
            try:
                with self._lock:
                    self._store.add(f"beat/{self._rank}", 1)
                beat = self._beat(peer)
            except Exception:
                reason, beat = reason or self._store_is_gone(), last_beat
            if beat != last_beat:
                last_beat, last_change = beat, time.monotonic()
            if reason is None and time.monotonic() - last_change > self._timeout_s:
                reason = self._write_failure(peer, self._describe_silent([peer]))
            if reason is not None:
                self._end_process(reason, stopped)
                return

    def _end_process(self, reason: str, stopped: threading.Event) -> None:
        """Give the main thread time to raise by itself, then end the process."""
        deadline = time.monotonic() + self._grace_s
        while time.monotonic() < deadline:
            if self._raised.is_set() or stopped.is_set():
                return
            time.sleep(self._interval_s / 5)
        sys.stderr.write(f"PeerError on rank {self._rank}: {reason}\n")
        sys.stderr.flush()
        os._exit(EXIT_CODE)

    def _beat(self, rank: int) -> int:
        with self._lock:
            if self._store.check([f"done/{rank}"]):
                return time.monotonic_ns()  # A rank that said goodbye is never silent.
            return int(self._store.add(f"beat/{rank}", 0))

    def _beats(self) -> dict[int, int]:
        with suppress(Exception):
            return {r: self._beat(r) for r in range(self._world_size) if r != self._rank}
        return {}

    def _read_failure(self) -> str | None:
        try:
            with self._lock:
                if self._reason is None and self._store.check([_FAILURE]):
                    self._reason = str(json.loads(self._store.get(_FAILURE))["reason"])
                    self._store.add("seen", int(self._rank != 0))
        except Exception:
            return self._reason or self._store_is_gone()
        return self._reason

    def _write_failure(self, rank: int, reason: str) -> str:
        text = json.dumps({"rank": rank, "reason": reason})
        with suppress(Exception), self._lock:
            first = self._store.compare_set(_FAILURE, "", text)
            self._store.add("seen", int(self._rank != 0 and self._reason is None))
            self._reason = str(json.loads(first)["reason"])
            return self._reason
        return reason

    def _describe_silent(self, ranks: list[int]) -> str:
        names = ", ".join(str(rank) for rank in ranks)
        return (
            f"Rank {names} died or stopped answering: no sign of life from "
            f"{'it' if len(ranks) == 1 else 'them'}. Look at that process's own log and at the "
            "system's (out of memory, preemption)."
        )

    def _store_is_gone(self) -> str:
        return (
            "Rank 0 died or stopped answering: the store that it serves is gone. Look at that "
            "process's own log and at the system's (out of memory, preemption)."
        )


def _is_broken_connection(error: Exception) -> bool:
    """Whether an error comes from a communicator rather than from the user's code."""
    if isinstance(error, DistError):
        return True
    if isinstance(error, HeteroError) or not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return "gloo" in text or "NCCL" in text or "Connection closed by peer" in text
