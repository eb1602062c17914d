"""Find out that another rank failed, say which and why, and never hang because of it.

Every rank beats in the store and watches the next one. A rank that raises writes the reason into
the store first. What a rank then sees of it differs: gloo closes the connection of a peer that is
gone, NCCL just never returns, and a rank that is frozen keeps its connections. All end the same
way: the waiting rank raises `PeerError` with the failed rank's reason, and a rank that can't even
raise, because its main thread waits inside a collective, is ended with that message and a non-zero
exit code. So is one whose teardown doesn't end. Rank 0 serves the store; it may be the frozen one.
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

from torch import OutOfMemoryError
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from lightning_hetero.core.errors import HeteroError, PeerError
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
"""Exit code of ranks that end together to be started anew."""

_GRACE_S = 10.0
"""How long a main thread may take to notice, where nobody goes on without the failed rank."""

_STARTING_S = 20.0
"""How long a rank may be silent while processes start: on a busy machine imports starve others."""

_STORE_IS_GONE = (
    "Rank 0 died or stopped answering: the store that it serves is gone. Look at that process's "
    "own log and at the system's (out of memory, preemption)."
)


_OWN_MEMORY = ("out of memory", "Failed to CUDA calloc", "Failed to CUDA host alloc")
"""In errors of NCCL that couldn't get buffers on this rank's device: no peer has failed."""

_PRINTED_BY = "_printed_in_one_line_by"
"""Attribute of an error that another rank prints whole: this rank."""


class AgreedExit(SystemExit):
    """All ranks end after the same step: no rank has failed, and none needs to be told."""

    def __init__(self, code: int = LEAVE_EXIT_CODE) -> None:
        super().__init__(code)


class GenerationChange(Exception):
    """All ranks have stopped between the same two steps, with a checkpoint of the first.

    Args:
        reason: Why.
        leaving: Ranks that end now; the others go on, with newcomers if some wait.
    """

    def __init__(self, reason: str, leaving: frozenset[int] = frozenset()) -> None:
        super().__init__(reason)
        self.leaving = leaving


def print_in_one_line(error: BaseException, rank: int) -> None:
    """Print an error without its traceback if it ends this process: another rank prints one.

    Keeps no reference to the error: where it is caught, its traceback may hold a whole run.
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
        timeout: How long this process may take to end, or to go on, once another rank has failed.
        silence: How long a rank may be silent before it counts as dead; None takes `timeout`.
        bulletin: Where others than ranks say that one is gone; no rank serves the store then.
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
        """Ends what hangs in communicators; called, on a thread of its own, once a rank failed."""
        self.is_starting = False
        """Whether ranks may be silent for longer, as before training: a late one is only late."""
        self._reason: str | None = None
        self._is_judged = threading.Event()
        """Set once there is a reason why the run can't go on."""
        self._raised = threading.Event()
        self._judging: threading.Thread | None = None
        self._stopped = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Turn a peer's failure inside this context into `PeerError`, and report one's own."""
        try:
            yield
        except PeerError:
            self._raised.set()
            raise
        except Exception as error:
            if not _is_broken_connection(error):
                self.report(error)
                raise
            self._raised.set()
            reason = self.explain()
            self._wait_until_read()
            raise PeerError(reason) from error

    def beat(self) -> "Heartbeat":
        """Begin to show that this rank lives, before it watches the others."""
        if self._heartbeat is None:
            self._heartbeat = Heartbeat(
                self._store,
                global_rank=self._rank,
                world_size=self._world_size,
                interval_s=self._interval_s,
                bulletin=self._bulletin,
            )
            if self._bulletin is not None:
                # Then its connection is there, and none that groups open is taken for it.
                self._heartbeat.has_begun.wait(10 * self._interval_s)
        return self._heartbeat

    def start(self) -> None:
        """Begin to beat and to watch: from now on a silent peer is a dead one."""
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
        """Judge nobody from now on, but go on beating; returns what beats, to be ended."""
        atexit.unregister(self.stop)
        self._is_watching = False
        self._stopped.set()
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.wakes_judge.set()
        if self._judging is not None:
            # Communicators whose last holder is another thread never end theirs.
            self._judging.join(10 * self._interval_s)
        if self._aborting is not None:
            # A late one would hang up what the next generation has opened. And where Python ends
            # meanwhile, a thread that comes back from C++ is unwound by force, through code that
            # bears no exception: "terminate called without an active exception".
            self._aborting.join(10 * self._interval_s)
        return heartbeat

    def report(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed; the first report of all counts."""
        self._raised.set()
        if self._heartbeat is not None and not isinstance(error, PeerError):
            notes = getattr(error, "__notes__", ())
            text = "\n".join([f"{type(error).__name__}: {error}", *notes])
            self._heartbeat.tell(self._rank, f"Rank {self._rank} failed: {text}")
            self._is_judged.wait(8 * self._interval_s)
            self._wait_until_read()

    @property
    def failed_rank(self) -> int | None:
        """The rank that failed first, None while none has said so."""
        heartbeat = self._heartbeat
        return None if heartbeat is None or heartbeat.failed_rank < 0 else heartbeat.failed_rank

    def explain(self) -> str:
        """Return why a connection broke: waits until a failure is reported or a rank is silent."""
        if self._heartbeat is not None:
            self._heartbeat.suspect()
            self._is_judged.wait(min(self._timeout_s, 15.0))
        return self._reason or (
            "A connection to another rank broke, and no rank said why. See the other ranks' logs."
        )

    def _wait_until_read(self) -> None:
        """Let rank 0, if it serves the store, stay until the others have read why the run ends."""
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
        """Return why the run can't go on, None while nothing says so."""
        patience_s = max(self._silence_s, _STARTING_S) if self.is_starting else self._silence_s
        if heard.is_suspicious:
            patience_s = 6 * self._interval_s
        if heard.failure is not None:
            return heard.failure
        if heard.has_server_left:
            return None
        if heard.is_store_gone or store.look(heard.num_rounds) > patience_s:
            return _STORE_IS_GONE
        # While the store is silent nothing is known of the peer.
        if store.seconds == 0.0 and heard.look_at_peer() > patience_s:
            heard.tell(heard.peer, _describe_silent(heard.peer))
        return None

    def _end_run(self, reason: str, stopped: threading.Event) -> None:
        """Give the main thread time to raise and to clean up, then end the process."""
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


def _is_broken_connection(error: Exception) -> bool:
    """Whether an error is a communicator's, not one of this rank's own code or memory."""
    text = str(error)
    if isinstance(error, OutOfMemoryError) or any(word in text for word in _OWN_MEMORY):
        return False
    if isinstance(error, DistError):
        return True
    if isinstance(error, HeteroError) or not isinstance(error, RuntimeError):
        return False
    return "gloo" in text or "NCCL" in text or "Connection closed by peer" in text
