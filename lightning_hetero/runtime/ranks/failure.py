"""Find out that another rank failed, say which and why, and never hang because of it.

Every rank sends heartbeats through the store and watches the next rank's. A rank that raises first
writes the reason into the store. What others then see differs: gloo closes the connection of a peer
that is gone, NCCL just never returns, and a frozen rank keeps its connections. All cases end the
same way: the waiting rank raises `PeerError` with the failed rank's reason. A rank that can't
raise, because its main thread waits inside a collective or its teardown doesn't end, is ended with
that message and a non-zero exit code. Rank 0 serves the store; it may be the frozen one.
"""

import atexit
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from types import TracebackType

from torch.distributed.distributed_c10d import Store

from lightning_hetero.core.errors import PeerError
from lightning_hetero.runtime.ranks.broken import is_broken_connection
from lightning_hetero.runtime.ranks.heartbeat import Bulletin, Heartbeat, Silence
from lightning_hetero.runtime.ranks.meeting import end_process

__all__ = [
    "LEAVE_EXIT_CODE",
    "AgreedExit",
    "FailureDetector",
    "GenerationChange",
    "print_in_one_line",
]

LEAVE_EXIT_CODE = 14
"""Exit code of ranks that end together to be restarted."""

_GRACE_S = 10.0
"""Seconds that a main thread may take to notice a failure, if nobody goes on in place."""

_STARTING_S = 20.0
"""Seconds for which a rank may be silent while processes start: imports may starve its thread."""

_STORE_IS_GONE = (
    "Rank 0 died or stopped answering: the store that it serves is gone. Look at that process's "
    "own log and at the system's (out of memory, preemption)."
)
_STORE_OF_OTHERS_IS_GONE = (
    "The run's store has stopped answering: the node that serves it, the first one, was lost, is "
    "frozen or can't be reached. Look at the log of its torchrun, or of the process that was "
    "started there as rank 0, and at the system's (out of memory, preemption)."
)

_PRINTED_BY = "_printed_in_one_line_by"
"""Attribute of an error that another rank prints in full; holds this rank."""


class AgreedExit(SystemExit):
    """All ranks have agreed to end after the same step; none has failed or needs to be told."""

    def __init__(self, code: int = LEAVE_EXIT_CODE) -> None:
        super().__init__(code)


class GenerationChange(Exception):
    """All ranks have stopped between the same two steps, with a checkpoint of the first.

    Args:
        reason: Why.
        leaving: Ranks that end now; the others go on, with any newcomers that wait.
    """

    def __init__(self, reason: str, leaving: frozenset[int] = frozenset()) -> None:
        super().__init__(reason)
        self.leaving = leaving


def print_in_one_line(error: BaseException, rank: int) -> None:
    """If an error ends this process, print it without its traceback: another rank prints one.

    Keeps no reference to the error: if it is caught, its traceback may keep a whole run alive.
    """
    error.__dict__[_PRINTED_BY] = rank
    usual = sys.excepthook
    if getattr(usual, "func", None) is not _print_shortly:
        sys.excepthook = partial(_print_shortly, usual)


def _print_shortly(
    usual: Callable[..., None],
    kind: type[BaseException],
    raised: BaseException,
    trace: TracebackType | None,
) -> None:
    rank = getattr(raised, _PRINTED_BY, None)
    if rank is None:
        usual(kind, raised, trace)
    else:
        text = " ".join(str(raised).split())
        print(f"[rank{rank}] {kind.__name__}: {text}", file=sys.stderr)  # noqa: T201


class FailureDetector:
    """One rank's watch over the others.

    Args:
        store: The run's store.
        global_rank: This rank.
        world_size: Number of ranks.
        timeout: How long this process may take to end, or to go on, after another rank's failure.
        silence: How long a rank may be silent before it counts as dead; None takes `timeout`.
        bulletin: Tells of lost ranks independently of heartbeats; then no rank serves the store.
    """

    def __init__(
        self,
        store: Store,
        *,
        global_rank: int,
        world_size: int,
        timeout: timedelta,
        silence: timedelta | None = None,
        bulletin: Bulletin | None = None,
    ) -> None:
        self._store = store
        self._bulletin = bulletin
        self._rank = global_rank
        self._world_size = world_size
        self._timeout_s = timeout.total_seconds()
        self._silence_s = (silence or timeout).total_seconds()
        self._interval_s = min(0.5, self._silence_s / 10)
        # In place its own work (a compilation, a file) may take as long as the others wait for it.
        patience_s = _GRACE_S if bulletin is None else bulletin.patience_s
        self._grace_s = min(patience_s, self._timeout_s)
        self._heartbeat: Heartbeat | None = None
        self._is_watching = False
        self._aborting: threading.Thread | None = None
        self.abort: Callable[[], None] = lambda: None
        """Ends waits in communicators; called on a thread of its own once a rank has failed."""
        self.is_starting = False
        """Whether ranks may be silent for longer, since training hasn't begun."""
        self._reason: str | None = None
        self._is_judged = threading.Event()
        """Set once it is known why the run can't go on."""
        self._raised = threading.Event()
        self._judging: threading.Thread | None = None
        self._stopped = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In this context turn a peer's failure into `PeerError`, and report this rank's own."""
        try:
            yield
        except PeerError:
            self._raised.set()
            raise
        except Exception as error:
            if not is_broken_connection(error):
                self.report(error)
                raise
            self._raised.set()
            reason = self.explain()
            self._wait_until_read()
            raise PeerError(reason) from error

    def beat(self) -> "Heartbeat":
        """Begin to send heartbeats, before this rank watches the others; return what sends them."""
        if self._heartbeat is None:
            self._heartbeat = Heartbeat(
                self._store,
                global_rank=self._rank,
                world_size=self._world_size,
                interval_s=self._interval_s,
                bulletin=self._bulletin,
            )
            if self._bulletin is not None:
                # So that its connection exists, and isn't mistaken for one that groups open later.
                self._heartbeat.has_begun.wait(10 * self._interval_s)
        return self._heartbeat

    def start(self) -> None:
        """Begin to send heartbeats and to watch: from now on a silent peer counts as dead."""
        if self._is_watching:
            return
        self._is_watching = True
        self._reason = None
        self._is_judged.clear()
        self._raised.clear()
        self._stopped = threading.Event()
        beating = self.beat()
        self._judging = threading.Thread(
            target=self._watch, args=(beating, self._stopped), name="failure-detector", daemon=True
        )
        self._judging.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Say goodbye: this rank ends, or goes on alone, without having failed."""
        heartbeat = self.pause()
        if heartbeat is not None:
            heartbeat.end(10 * self._interval_s)

    def pause(self) -> "Heartbeat | None":
        """Stop watching, but keep sending heartbeats; return what sends them, to be ended later."""
        atexit.unregister(self.stop)
        self._is_watching = False
        self._stopped.set()
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.wakes_judge.set()
        if self._judging is not None:
            # Communicators that are destroyed by another thread never end their own threads.
            self._judging.join(10 * self._interval_s)
        if self._aborting is not None:
            # A late one would hang up what the next generation has opened. And where Python ends
            # meanwhile, a thread that comes back from C++ is unwound by force, through code that
            # bears no exception: "terminate called without an active exception".
            self._aborting.join(10 * self._interval_s)
        return heartbeat

    def report(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed; only the run's first report counts."""
        self._raised.set()
        if self._heartbeat is not None and not isinstance(error, PeerError):
            notes = getattr(error, "__notes__", ())
            text = "\n".join([f"{type(error).__name__}: {error}", *notes])
            self._heartbeat.tell(self._rank, f"Rank {self._rank} failed: {text}")
            self._is_judged.wait(8 * self._interval_s)
            self._wait_until_read()

    @property
    def failed_rank(self) -> int | None:
        """The rank that failed first; None while there is no report."""
        heartbeat = self._heartbeat
        return None if heartbeat is None or heartbeat.failed_rank < 0 else heartbeat.failed_rank

    def explain(self) -> str:
        """Wait until a failure is reported or a rank is silent; return why a connection broke."""
        if self._heartbeat is not None:
            self._heartbeat.suspect()
            self._is_judged.wait(min(self._timeout_s, 15.0))
        return self._reason or (
            "A connection to another rank broke, and no rank said why. See the other ranks' logs."
        )

    def _wait_until_read(self) -> None:
        """On a rank 0 that serves the store, wait until the others have read why the run ends."""
        heartbeat = self._heartbeat
        if self._rank == 0 and heartbeat is not None and self._bulletin is None:
            num_others = self._world_size - len({0, heartbeat.failed_rank} - {-1})
            self._wait(lambda: heartbeat.num_readers >= num_others, 8 * self._interval_s)

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < deadline_s:
            time.sleep(self._interval_s / 10)

    # -- the watching thread --------------------------------------------------------------------

    def _watch(self, heard: Heartbeat, stopped: threading.Event) -> None:
        store = Silence(2 * self._interval_s)
        while not stopped.is_set():
            heard.wakes_judge.wait(self._interval_s / 2)
            if stopped.is_set():
                return
            self._reason = self._judge(heard, store)
            if self._reason is not None:
                self._is_judged.set()
                self._end_run(self._reason, stopped)
                return

    def _judge(self, heard: Heartbeat, store: Silence) -> str | None:
        """Return why the run can't go on; None as long as it can."""
        patience_s = max(self._silence_s, _STARTING_S) if self.is_starting else self._silence_s
        if heard.is_suspicious:
            patience_s = 6 * self._interval_s
        if heard.failure is not None:
            return heard.failure
        if heard.has_server_left:
            return None
        if heard.is_store_gone or store.look(heard.num_rounds) > patience_s:
            return _STORE_IS_GONE if self._bulletin is None else _STORE_OF_OTHERS_IS_GONE
        # While the store is silent nothing is known of the peer.
        if store.seconds == 0.0 and heard.look_at_peer() > patience_s:
            heard.tell(heard.peer, _describe_silent(heard.peer))
        return None

    def _end_run(self, reason: str, stopped: threading.Event) -> None:
        """Give the main thread time to raise and clean up, then end the process."""
        aborting = threading.Thread(target=self._abort_quietly, name="abort", daemon=True)
        aborting.start()
        self._aborting = aborting  # Begun, so that the main thread may wait for it.
        start_s = time.monotonic()
        while not stopped.wait(self._interval_s / 5):
            limit_s = self._timeout_s if self._raised.is_set() else self._grace_s
            if time.monotonic() - start_s > limit_s:
                end_process(self._rank, reason)

    def _abort_quietly(self) -> None:
        with suppress(Exception):
            self.abort()


def _describe_silent(rank: int) -> str:
    return (
        f"Rank {rank} died or stopped answering: no sign of life from it. Look at that process's "
        "own log and at the system's (out of memory, preemption)."
    )
