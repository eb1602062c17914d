"""Find out that another rank has failed, report which one and why, and never hang because of it.

Every process sends heartbeats through the store, and each rank watches the next ones (`heartbeat`).
A rank that raises an error first writes the reason into the store. Other ranks notice a failure in
different ways: gloo closes the connection to a dead peer, NCCL never returns, and connections to a
frozen rank stay open. In all cases the waiting rank raises `PeerError` with the failed rank's
reason. If it can't, because its main thread waits inside a collective or its teardown doesn't end,
the process is ended with that message and a non-zero exit code. All this works even if it is rank
0, which may serve the store, that is frozen.
"""

import atexit
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from lightning_hetero.core.errors import PeerError
from lightning_hetero.core.process import Deadline
from lightning_hetero.runtime.ranks.connections import is_broken_connection
from lightning_hetero.runtime.ranks.heartbeat import Heartbeat, Ring, Silence, Watch
from lightning_hetero.runtime.ranks.meeting import end_process

LEAVE_EXIT_CODE = 14
"""Exit code of ranks that have agreed to end in order to be restarted."""

_STARTING_S = 20.0
"""Seconds that a rank may be silent while processes start: imports may stop its thread."""

_STORE_IS_GONE = (
    "Rank 0 died or stopped answering: the store that it serves is gone. Look at that process's "
    "own log and at the system's (out of memory, preemption)."
)
_STORE_OF_OTHERS_IS_GONE = (
    "The run's store has stopped answering: the node that serves it, the first one, was lost, is "
    "frozen or can't be reached. Look at the log of its torchrun, or of the process that was "
    "started there as rank 0, and at the system's (out of memory, preemption)."
)


class AgreedExit(SystemExit):
    """All ranks have agreed to end after the same step; none has failed or needs to be told."""

    def __init__(self, code: int = LEAVE_EXIT_CODE) -> None:
        super().__init__(code)


class GenerationChange(Exception):
    """All ranks have stopped after the same step and have saved it, or needn't.

    Args:
        reason: Why they have stopped.
        leaving: Ranks that end now; the others go on, with any joiners that wait.
    """

    def __init__(self, reason: str, leaving: frozenset[int] = frozenset()) -> None:
        super().__init__(reason)
        self.leaving = leaving


class FailureDetector:
    """Finds out on one rank when another one has failed.

    Args:
        heartbeat: This process's heartbeat.
        ring: The ranks.
        timeout: How long this process may take to end, or to go on, after another rank's failure.
        silence: How long a rank may be silent before it counts as dead; None takes `timeout`.
        abort: Ends waits in communicators; called on a thread of its own once a rank has failed.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        ring: Ring,
        *,
        timeout: timedelta,
        silence: timedelta | None = None,
        abort: Callable[[], None] = lambda: None,
    ) -> None:
        self._heartbeat = heartbeat
        self._interval_s = heartbeat.interval_s
        self._ring = ring
        self._rank = ring.rank
        self._timeout_s = timeout.total_seconds()
        self._silence_s = (silence or timeout).total_seconds()
        # The main thread must notice another rank's failure within this time, or the process is
        # ended. If ranks go on in place, the others wait `patience_s` for it, so it may be busy for
        # that long, compiling or with a file.
        self._grace_s = min(ring.patience_s, self._timeout_s)
        self._watch: Watch | None = None
        self._aborting: threading.Thread | None = None
        self._abort = abort
        self._is_starting = False
        self._reason: str | None = None
        self._is_judged = threading.Event()
        """Set once the reason is known why the run can't go on."""
        self._raised = threading.Event()
        self._judging: threading.Thread | None = None
        self._stopped = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context that turns a peer's failure into `PeerError`, and reports this rank's own."""
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
            self._let_others_read()
            raise PeerError(reason) from error

    def start(self) -> None:
        """Begin to send heartbeats and to watch: from now on a silent peer counts as dead."""
        if self._watch is not None:
            return
        self._heartbeat.begin()
        self._watch = watch = self._heartbeat.watch(self._ring)
        self._reason = None
        self._is_judged.clear()
        self._raised.clear()
        self._stopped = threading.Event()
        self._judging = threading.Thread(
            target=self._run, args=(watch, self._stopped), name="failure-detector", daemon=True
        )
        self._judging.start()
        atexit.register(self.stop)

    def expect_slow_start(self, *, is_expected: bool) -> None:
        """Allow ranks a longer silence while processes start, or no longer allow it."""
        self._is_starting = is_expected

    def stop(self) -> None:
        """Report that this rank ends, or goes on alone, without a failure."""
        self.pause()
        self._heartbeat.end(10 * self._interval_s)

    def pause(self) -> None:
        """Stop watching; this process goes on sending heartbeats."""
        atexit.unregister(self.stop)
        self._stopped.set()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.wakes_judge.set()
        if self._judging is not None:
            # Communicators never end their own threads if another thread destroys them.
            self._judging.join(10 * self._interval_s)
        if self._aborting is not None:
            # A thread that is late would close what the next generation has opened. And if Python
            # ends meanwhile, a thread that returns from C++ is unwound by force, through code that
            # mustn't raise: "terminate called without an active exception".
            self._aborting.join(10 * self._interval_s)

    def report(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed; only the run's first report counts."""
        has_reported = self._raised.is_set()  # An error may pass through several callers.
        self._raised.set()
        if self._watch is not None and not has_reported and not isinstance(error, PeerError):
            notes = getattr(error, "__notes__", ())
            text = "\n".join([f"{type(error).__name__}: {error}", *notes])
            self._heartbeat.tell(self._rank, f"Rank {self._rank} failed: {text}")
            self._is_judged.wait(8 * self._interval_s)
            self._let_others_read()

    def explain(self) -> str:
        """Wait until a failure is reported or a rank is silent; return why a connection broke."""
        if self._watch is not None:
            self._heartbeat.suspect()
            # In short waits, because the machine itself may stand still for longer than them all.
            for _ in range(math.ceil(min(self._timeout_s, 15.0) / self._interval_s)):
                if self._is_judged.wait(self._interval_s):
                    break
        return self._reason or (
            "A connection to another rank broke, or it took too long to answer, and no rank said "
            "why. See the other ranks' logs. Ranks wait in vain if a hook stops, skips or saves on "
            "some of them only, as in `if trainer.is_global_zero: trainer.should_stop = True`: let "
            "all ranks decide alike."
        )

    def _let_others_read(self) -> None:
        """If this is rank 0 and it serves the store, give others time to read why the run ends."""
        if self._rank == 0 and self._ring.find_gone is None:
            self._heartbeat.wait_until_heard(3 * self._interval_s)

    # -- the judging thread ---------------------------------------------------------------------

    def _run(self, watch: Watch, stopped: threading.Event) -> None:
        store = Silence(2 * self._interval_s)
        while not stopped.is_set():
            watch.wakes_judge.wait(self._interval_s / 2)
            if stopped.is_set():
                return
            self._reason = self._judge(watch, store)
            if self._reason is not None:
                self._is_judged.set()
                self._end_run(self._reason, stopped)
                return

    def _judge(self, watch: Watch, store: Silence) -> str | None:
        """Return why the run can't go on; None as long as it can."""
        patience_s = max(self._silence_s, _STARTING_S) if self._is_starting else self._silence_s
        if watch.is_suspicious:
            patience_s = 6 * self._interval_s
        if watch.failure is not None:
            return watch.failure
        if watch.has_server_left:
            return None
        heard = self._heartbeat
        if heard.is_store_gone or store.look(heard.num_rounds) > patience_s:
            return _STORE_IS_GONE if self._ring.find_gone is None else _STORE_OF_OTHERS_IS_GONE
        # Measured in rounds of the heartbeat: while the store doesn't answer, peers can't be seen.
        silent = (rank for rank, seconds in watch.silences_s.items() if seconds > patience_s)
        if (rank := next(silent, None)) is not None:
            heard.tell(rank, _describe_silent(rank))
        return None

    def _end_run(self, reason: str, stopped: threading.Event) -> None:
        """Give the main thread time to raise and clean up, then end the process."""
        aborting = threading.Thread(target=self._abort_quietly, name="abort", daemon=True)
        aborting.start()
        self._aborting = aborting  # Already started, so that the main thread can wait for it.
        raised, unnoticed = Deadline(self._timeout_s), Deadline(self._grace_s)
        while not stopped.wait(self._interval_s / 5):
            if (raised if self._raised.is_set() else unnoticed).is_over:
                end_process(self._rank, reason)

    def _abort_quietly(self) -> None:
        with suppress(Exception):
            self._abort()


def _describe_silent(rank: int) -> str:
    return (
        f"Rank {rank} died or stopped answering: no sign of life from it. Look at that process's "
        "own log and at the system's (out of memory, preemption)."
    )
