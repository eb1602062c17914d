"""Where ranks find the one assignment of each iteration, whoever planned it.

The first text published under a key is the one that counts, for everyone: a producer that comes too
late, or two ranks that plan the same iteration, change nothing. A text goes when all have read it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError, HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from lightning_hetero.core.errors import PeerError

__all__ = ["AssignmentStore", "open_store"]

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
