"""Have every iteration's assignment at hand when it is needed (Hydraulis §4).

One producer plans an iteration while earlier ones train; every rank reads the same text from the
store. A rank that has waited for `patience_s` plans by itself. The first text published under a key
is the one that counts, for everyone, and planning depends on nothing but the request: a producer
that comes too late costs time and changes nothing. A text goes when all have read it.

A producer is a thread that asks a process (`core.process.answering`).
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
    """Texts that the ranks share, in a store of torch.distributed; threads may use it at once.

    Args:
        store: The ranks', to which a connection of its own is made; None if there is one rank.
    """

    def __init__(self, store: Any = None) -> None:
        self._store: Any = HashStore() if store is None else store.clone()

    def publish(self, key: str, text: str) -> str:
        """Set a key unless it is set; return the text that counts."""
        with _naming_the_server():
            counts: bytes = self._store.compare_set(key, "", text)
        return counts.decode()

    def wait(self, key: str, timeout_s: float) -> str | None:
        """Return a key's text as soon as it is set, None after the timeout."""
        # Asking now and then, because a connection that waits is locked: the thread that publishes
        # what is waited for may share it.
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
        """Say that this reader needs a key no more; the last of `num_readers` deletes it."""
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
    """Return the store of the ranks that run; collective.

    Args:
        agree: Returns rank 0's argument on every rank.
        own_name: Any name that no run before had, such as a random one; what an earlier run left
            in a store that outlives it is never found.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return AssignmentStore()
    return AssignmentStore(PrefixStore(agree(own_name), _get_default_store()))


_UNAIDED = "!"
"""Marks a text that a trainer has planned by itself."""


@dataclass(frozen=True, kw_only=True)
class AheadOptions:
    """How far ahead iterations are planned, and by how many.

    Raises:
        ConfigurationError: A number is out of range.
    """

    num_producers: int = 2
    """Planning processes of all ranks together, spread over them; 0 plans when needed."""
    num_ahead: int = 6
    """Iterations planned ahead of the one that is dealt."""
    patience_s: float = 30.0
    """Seconds to wait for a producer before planning here."""

    def __post_init__(self) -> None:
        if self.num_producers < 0 or self.num_ahead < 0 or self.patience_s < 0:
            raise ConfigurationError(f"{self}: each number must be 0 or more.")


class Producer:
    """Plans what it is asked for, in order, and publishes it.

    A process that dies costs the time of planning here instead.
    """

    def __init__(self, store: AssignmentStore, process: AnsweringProcess | None = None) -> None:
        self._store = store
        self._process = process or AnsweringProcess(iteration.__name__)
        self._requests: queue.SimpleQueue[tuple[str, AssignmentRequest] | None]
        self._requests = queue.SimpleQueue()
        self._wanted: set[str] = set()
        self._publishing = threading.Lock()
        self.complaints: deque[str] = deque()
        """Failures for the main thread to warn of."""
        self._thread = threading.Thread(target=self._run, name="assignments", daemon=True)
        self._thread.start()

    def request(self, key: str, request: AssignmentRequest) -> None:
        """Plan an iteration and publish it under a key."""
        self._wanted.add(key)
        self._requests.put((key, request))

    def withdraw(self, key: str) -> None:
        """Publish a key no more, now that it is or needn't be: it may soon be deleted."""
        with self._publishing:
            self._wanted.discard(key)

    def close(self) -> None:
        """End thread and process."""
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
            try:
                with self._publishing:
                    if key in self._wanted:
                        self._store.publish(key, text)
            except RuntimeError as error:
                # The store's server has gone, and the run with it.
                self.complaints.append(f"A producer can't reach the store: {error}")
                return

    def _plan(self, request: AssignmentRequest) -> str:
        try:
            text: str = self._process.ask(request)
            return text
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self._process.restart()
            self.complaints.append(
                f"The planning process has died ({type(error).__name__}); this iteration is "
                "planned in the trainer's own process, the next one in a new one."
            )
            return plan_text(request)


class AheadPlanner:
    """One rank's view of the producers.

    Args:
        store: The store that the ranks share.
        global_rank: This rank.
        world_size: Number of ranks.
        options: How far ahead, and by how many.
        producer: This rank's producer; None starts one where the rank has one.
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
        """Have an iteration planned; called on all ranks in the same order.

        Args:
            serial: Number of the request, which says whose it is.
            key: Its key, never used before.
            request: What is to be planned.
        """
        if self._producer is not None and serial % self._num_producers == self._own_index:
            self._producer.request(key, request)

    def take(self, serial: int, key: str, request: AssignmentRequest) -> Assignment:
        """Return the assignment that counts for all ranks; each rank takes each key once.

        Raises:
            AssignmentError: No candidate plan holds the samples.
            BatchError: Another rank has drawn other samples.
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
        """Give up an iteration that was requested; each rank either takes or forgets it."""
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
        # One that was late is not waited for again until it is in time.
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
