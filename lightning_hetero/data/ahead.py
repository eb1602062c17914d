"""Assign iterations in the background, before their assignments are needed (Hydraulis §4).

Rank 0 has a planning process (`core.process`) that plans the next iterations while the present one
trains. A thread publishes their assignments, as texts, in a store that all ranks read. If a rank
has waited too long, it plans the iteration itself. The first text that is published under a key
counts for all ranks, and it depends only on the request: so late planning costs time but changes
nothing. A text is deleted when all ranks have read it.
"""

import logging
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError, HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from lightning_hetero.assign import iteration
from lightning_hetero.assign.iteration import AssignmentRequest, plan_text, read_assignment
from lightning_hetero.core.actions import Assignment
from lightning_hetero.core.errors import PeerError
from lightning_hetero.core.process import AnsweringProcess

_log = logging.getLogger(__name__)
_PATIENCE_S = 30.0
"""Seconds that a rank waits for the planning process before it plans an iteration itself."""
_PAUSE_S = 0.02


class AssignmentStore:
    """Texts that all ranks share, in a store of torch.distributed; thread-safe.

    Its methods raise PeerError if rank 0, which serves the store, is gone.

    Args:
        store: The ranks' store, to which a new connection is opened; None for a single rank.
    """

    def __init__(self, store: Any = None) -> None:
        self._store: Any = HashStore() if store is None else store.clone()

    def publish(self, key: str, text: str) -> str:
        """Set a key to a text unless the key has one already; return the key's text."""
        with _naming_the_server():
            counts: bytes = self._store.compare_set(key, "", text)
        return counts.decode()

    def wait(self, key: str, timeout_s: float) -> str | None:
        """Return a key's text as soon as it is set; None after the timeout."""
        # By polling: a blocking wait would lock the connection, which may be shared with the thread
        # that publishes this key.
        deadline_s = time.monotonic() + timeout_s
        with _naming_the_server():
            while not self._store.check([key]):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                time.sleep(min(_PAUSE_S, left_s))
            text: bytes = self._store.get(key)
        return text.decode()

    def retire(self, key: str, num_readers: int) -> None:
        """Note that one reader no longer needs a key; the last of `num_readers` deletes it."""
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
        own_name: A name that no earlier run had, such as a random one, so that texts of an earlier
            run are never found, even if torch's store has outlived it.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return AssignmentStore()
    return AssignmentStore(PrefixStore(agree(own_name), _get_default_store()))


class AheadPlanner:
    """Requests assignments and waits for them, on one rank.

    Args:
        store: The store that the ranks share.
        global_rank: This rank; rank 0 plans for all.
        world_size: Number of ranks.
        num_ahead: Number of iterations to plan ahead; with 0 each is planned when it is needed, by
            the rank that needs it first.
    """

    def __init__(
        self,
        store: AssignmentStore,
        *,
        global_rank: int = 0,
        world_size: int = 1,
        num_ahead: int = 0,
    ) -> None:
        self.num_ahead = num_ahead
        self._store = store
        self._world_size = world_size
        self._patience_s = _PATIENCE_S if num_ahead else 0.0
        self._wanted: set[str] = set()
        self._process: AnsweringProcess | None = None
        if num_ahead and global_rank == 0:
            self._process = AnsweringProcess(iteration.__name__)
            self._thread = ThreadPoolExecutor(1, "assignments")

    def request(self, key: str, request: AssignmentRequest) -> None:
        """Have an iteration planned in the background; all ranks call it in the same order.

        Args:
            key: Key of the assignment, never used before.
            request: The iteration's samples and candidate plans.
        """
        if self._process is not None:
            self._wanted.add(key)
            self._thread.submit(self._plan, self._process, key, request)

    def take(self, key: str, request: AssignmentRequest) -> Assignment:
        """Return an assignment, the same on all ranks; each rank takes each key once.

        Raises:
            AssignmentError: No candidate plan holds the samples.
            BatchError: The rank that planned has drawn other samples than this one.
            PeerError: Rank 0, which serves the store, is gone.
        """
        text = self._store.wait(key, self._patience_s)
        if text is None:
            if self._patience_s:
                _log.warning(
                    "No assignment has come within %g s, so the trainer plans this iteration "
                    "itself. Give planning more time (num_ahead), or use fewer candidate plans.",
                    self._patience_s,
                )
            text = self._store.publish(key, plan_text(request))
        self.forget(key)
        return read_assignment(text, request)

    def forget(self, key: str) -> None:
        """Drop a requested iteration; each rank must either take or forget it."""
        self._wanted.discard(key)
        self._store.retire(key, self._world_size)

    def close(self) -> None:
        """End the planning process."""
        if self._process is not None:
            self._wanted.clear()
            self._process.kill()
            self._thread.shutdown(cancel_futures=True)
            self._process.stop()

    def _plan(self, process: AnsweringProcess, key: str, request: AssignmentRequest) -> None:
        """Plan an iteration in the process and publish it; here if the process has died."""
        if key not in self._wanted:
            return
        try:
            text: str = process.ask(request)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            if not self._wanted:
                return  # `close` has killed the process.
            _log.warning(
                "The planning process has died (%s); this iteration is planned in the trainer's "
                "own process, the next one in a new one.",
                type(error).__name__,
            )
            process.restart()
            text = plan_text(request)
        if key in self._wanted:
            self._store.publish(key, text)
