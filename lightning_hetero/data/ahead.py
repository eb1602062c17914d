"""Assign iterations in the background, before their assignments are needed (Hydraulis §4).

One producer plans an iteration while earlier ones train, and publishes the assignment, a text, in
a store that all ranks read. A rank that has waited for `patience_s` plans the iteration itself. The
first text published under a key counts for all ranks, and it depends only on the request: so a
producer that is late costs time but changes nothing. A text is deleted when all ranks have read it.

A producer is a thread with a planning process (`core.process.answering`).
"""

import pickle
import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError, HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from lightning_hetero.assign import iteration
from lightning_hetero.assign.iteration import AssignmentRequest, plan_text, read_assignment
from lightning_hetero.core.assignment import Assignment
from lightning_hetero.core.errors import ConfigurationError, PeerError
from lightning_hetero.core.process.answering import AnsweringProcess

__all__ = ["AheadOptions", "AheadPlanner", "AssignmentStore", "Producer", "open_store"]

_SHORTEST_PAUSE_S = 1e-3
_LONGEST_PAUSE_S = 0.05


class AssignmentStore:
    """Texts that all ranks share, in a store of torch.distributed; thread-safe.

    Its methods raise PeerError if rank 0, which serves the store, is gone.

    Args:
        store: The ranks' store, to which a new connection is opened; None for a single rank.
    """

    def __init__(self, store: Any = None) -> None:
        self._store: Any = HashStore() if store is None else store.clone()

    def publish(self, key: str, text: str) -> str:
        """Set a key to a text unless it is set already; return the key's text."""
        with _naming_the_server():
            counts: bytes = self._store.compare_set(key, "", text)
        return counts.decode()

    def wait(self, key: str, timeout_s: float) -> str | None:
        """Return a key's text as soon as it is set; None after the timeout."""
        # Polls: a blocking wait would lock the connection, which may be shared with the thread that
        # publishes this key.
        deadline_s = time.monotonic() + timeout_s
        pause_s = _SHORTEST_PAUSE_S
        with _naming_the_server():
            while not self._store.check([key]):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                time.sleep(min(pause_s, left_s))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            text: bytes = self._store.get(key)
        return text.decode()

    def retire(self, key: str, num_readers: int) -> None:
        """Note that one reader is done with a key; the last of `num_readers` deletes it."""
        reads = f"{key}/reads"
        with _naming_the_server():
            if self._store.add(reads, 1) >= num_readers:
                self._store.delete_key(reads)
                self._store.delete_key(key)


@contextmanager
def _naming_the_server() -> Iterator[None]:
    try:
        yield
    except DistError as error:
        raise PeerError(
            "Rank 0 died or stopped answering: the store that it serves, in which ranks find what "
            "was planned for them, is gone. Look at that process's own log and at the system's."
        ) from error


def open_store(agree: Callable[[str], str], own_name: str) -> AssignmentStore:
    """Return a store that all ranks share; collective.

    Args:
        agree: Returns rank 0's argument on every rank.
        own_name: A name that no earlier run had, such as a random one. So texts of an earlier run
            are never found, even if torch's store has outlived it.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return AssignmentStore()
    return AssignmentStore(PrefixStore(agree(own_name), _get_default_store()))


_UNAIDED = "!"
"""Prefix of texts that a rank has planned itself, instead of a producer."""


@dataclass(frozen=True, kw_only=True)
class AheadOptions:
    """How far ahead iterations are planned, and by how many processes.

    Raises:
        ConfigurationError: A number is out of range.
    """

    num_producers: int = 2
    """Planning processes of all ranks together, spread over the ranks; 0: plan when needed."""
    num_ahead: int = 6
    """Iterations planned ahead of the one that is dealt."""
    patience_s: float = 30.0
    """Seconds that a rank waits for a producer before it plans the iteration itself."""

    def __post_init__(self) -> None:
        if self.num_producers < 0 or self.num_ahead < 0 or self.patience_s < 0:
            raise ConfigurationError(f"{self}: each number must be 0 or more.")


class Producer:
    """Plans requested iterations in order, in the background, and publishes the assignments.

    If its process dies, the thread plans that iteration, and a new process the next ones.
    """

    def __init__(self, store: AssignmentStore, process: AnsweringProcess | None = None) -> None:
        self._store = store
        self._process = process or AnsweringProcess(iteration.__name__)
        self._requests: queue.SimpleQueue[tuple[str, AssignmentRequest] | None]
        self._requests = queue.SimpleQueue()
        self._wanted: set[str] = set()
        self._publishing = threading.Lock()
        self._is_closing = False
        self.complaints: deque[str] = deque()
        """Failures, of which the main thread warns."""
        self._thread = threading.Thread(target=self._run, name="assignments", daemon=True)
        self._thread.start()

    def request(self, key: str, request: AssignmentRequest) -> None:
        """Queue an iteration, to be planned and published under a key; returns at once."""
        self._wanted.add(key)
        self._requests.put((key, request))

    def withdraw(self, key: str) -> None:
        """Never publish a key from now on: it is no longer needed and may be deleted."""
        with self._publishing:
            self._wanted.discard(key)

    def close(self) -> None:
        """Drop all requests, also one that is being planned; end the process and the thread."""
        self._is_closing = True
        self._wanted.clear()
        self._requests.put(None)
        self._process.kill()
        self._thread.join()
        self._process.stop()

    def _run(self) -> None:
        while (item := self._requests.get()) is not None:
            key, request = item
            if key not in self._wanted:
                continue
            text = self._plan(request)
            if text is None:
                return
            try:
                with self._publishing:
                    if key in self._wanted:
                        self._store.publish(key, text)
            except RuntimeError as error:
                # Rank 0, which serves the store, is gone, so the run ends anyway.
                self.complaints.append(f"A producer can't reach the store: {error}")
                return

    def _plan(self, request: AssignmentRequest) -> str | None:
        """Return the text of an iteration; None if `close` has killed the process."""
        try:
            text: str = self._process.ask(request)
            return text
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            if self._is_closing:
                return None
            self._process.restart()
            self.complaints.append(
                f"The planning process has died ({type(error).__name__}); this iteration is "
                "planned in the trainer's own process, the next one in a new one."
            )
            return plan_text(request)


class AheadPlanner:
    """Requests assignments and takes them, on one rank.

    Args:
        store: The store that the ranks share.
        global_rank: This rank.
        world_size: Number of ranks.
        options: How far ahead to plan, and by how many processes; None plans when needed.
        producer: This rank's producer; None starts one if the rank is to have one.
    """

    def __init__(
        self,
        store: AssignmentStore,
        *,
        global_rank: int = 0,
        world_size: int = 1,
        options: AheadOptions | None = None,
        producer: Producer | None = None,
    ) -> None:
        self.options = options or AheadOptions(num_producers=0)
        self._store = store
        self._world_size = world_size
        count = min(self.options.num_producers, world_size)
        hosts = [index * world_size // count for index in range(count)]
        self._num_producers = count
        self._own_index = hosts.index(global_rank) if global_rank in hosts else None
        if producer is None and self._own_index is not None:
            producer = Producer(store)
        self._producer = producer
        self._late: set[int] = set()

    def request(self, serial: int, key: str, request: AssignmentRequest) -> None:
        """Let the responsible producer plan an iteration; all ranks call it in the same order.

        Args:
            serial: Number of the request, which decides on the producer.
            key: Key of the assignment, never used before.
            request: The iteration's samples and candidate plans.
        """
        if self._producer is not None and serial % self._num_producers == self._own_index:
            self._producer.request(key, request)

    def take(self, serial: int, key: str, request: AssignmentRequest) -> Assignment:
        """Return an assignment, the same on all ranks; each rank takes each key once.

        Waits for the producer, for `patience_s` at most, else plans here.

        Raises:
            AssignmentError: No candidate plan holds the samples.
            BatchError: The rank that planned has drawn other samples than this one.
            PeerError: Rank 0, which serves the store, is gone.
        """
        text = self._wait(serial, key)
        if text is None:
            text = self._store.publish(key, _UNAIDED + plan_text(request))
        if self._producer is not None:
            self._producer.withdraw(key)
            while self._producer.complaints:
                warnings.warn(self._producer.complaints.popleft(), stacklevel=2)
        self._store.retire(key, self._world_size)
        return read_assignment(text.removeprefix(_UNAIDED), request)

    def forget(self, key: str) -> None:
        """Drop a requested iteration; each rank must either take or forget it."""
        if self._producer is not None:
            self._producer.withdraw(key)
        self._store.retire(key, self._world_size)

    def close(self) -> None:
        """End this rank's producer."""
        if self._producer is not None:
            self._producer.close()

    def _wait(self, serial: int, key: str) -> str | None:
        if self._num_producers == 0:
            return self._store.wait(key, 0.0)
        index = serial % self._num_producers
        # A producer that was late isn't waited for until it has been in time again.
        patience_s = 0.0 if index in self._late else self.options.patience_s
        text = self._store.wait(key, patience_s)
        if text is not None:
            if not text.startswith(_UNAIDED):
                self._late.discard(index)
        elif index not in self._late:
            self._late.add(index)
            warnings.warn(
                f"Producer {index} hasn't planned the next iteration within {patience_s:g} s, so "
                "the trainer plans by itself until it catches up. Give planning more time: more "
                "num_ahead or num_producers in AheadOptions, or fewer candidate plans.",
                stacklevel=3,
            )
        return text
