"""Stand-ins for stores and peers: in memory, slow, or broken on cue."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator

from torch.distributed import HashStore  # type: ignore[attr-defined]

from lightning_hetero.checkpoint.manifest import Buffer
from lightning_hetero.checkpoint.statuses import Peers
from lightning_hetero.checkpoint.store import Store

_PIECE_BYTES = 256 << 10


class MemoryStore:
    """Files in a dict, with room for `capacity_bytes`."""

    def __init__(self, name: str = "memory", *, capacity_bytes: int | None = None) -> None:
        self.files: dict[str, bytes] = {}
        self._name = name
        self._lock = threading.Lock()
        self._capacity_bytes = capacity_bytes

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        """Keep a copy; OSError(ENOSPC) when full."""
        data = b"".join(chunks)
        with self._lock:
            others = sum(len(kept) for other, kept in self.files.items() if other != name)
            if self._capacity_bytes is not None and others + len(data) > self._capacity_bytes:
                raise OSError(28, "No space left on device", name)
            self.files[name] = data

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop)."""
        try:
            return self.files[name][start:stop]
        except KeyError:
            raise FileNotFoundError(2, "No such file", name) from None

    def list(self) -> dict[str, int]:
        """Return names and sizes."""
        with self._lock:
            return {name: len(data) for name, data in self.files.items()}

    def remove(self, names: Collection[str]) -> None:
        """Forget files."""
        with self._lock:
            for name in names:
                self.files.pop(name, None)

    def __str__(self) -> str:
        return self._name


class Throttle:
    """A link or device of limited bandwidth that several users share."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def pass_through(self, num_bytes: int) -> None:
        """Return when that many bytes have got through, first come first served."""
        with self._lock:
            start_s = max(self._free_at_s, time.monotonic())
            self._free_at_s = start_s + num_bytes / self._bytes_per_s
            wake_s = self._free_at_s
        time.sleep(max(0.0, wake_s - time.monotonic()))


class ThrottledStore:
    """A store as slow as a throttle, which other stores may share."""

    def __init__(self, store: Store, throttle: Throttle) -> None:
        self._store = store
        self._throttle = throttle

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        """Write as fast as the throttle lets chunks pass."""

        def slow() -> Iterator[Buffer]:
            for chunk in chunks:
                self._throttle.pass_through(len(chunk))
                yield chunk

        self._store.write(name, slow())

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read, then wait until the bytes have got through."""
        data = self._store.read(name, start, stop)
        for position in range(0, len(data), _PIECE_BYTES):
            self._throttle.pass_through(len(data[position : position + _PIECE_BYTES]))
        return data

    def list(self) -> dict[str, int]:
        """List without delay."""
        return self._store.list()

    def remove(self, names: Collection[str]) -> None:
        """Remove without delay."""
        self._store.remove(names)

    def __str__(self) -> str:
        return str(self._store)


class FaultyStore:
    """A store that calls `before(verb, name)` first; what that raises is the store's answer.

    For a write it is called twice: as "write" before the first byte and as "commit" when all bytes
    are written but the file doesn't exist yet.
    """

    def __init__(self, store: Store, before: Callable[[str, str], None]) -> None:
        self._store = store
        self._before = before

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        """Write unless `before` raises."""
        self._before("write", name)

        def watched() -> Iterator[Buffer]:
            yield from chunks
            self._before("commit", name)

        self._store.write(name, watched())

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read unless `before` raises."""
        self._before("read", name)
        return self._store.read(name, start, stop)

    def list(self) -> dict[str, int]:
        """List unless `before` raises."""
        self._before("list", "")
        return self._store.list()

    def remove(self, names: Collection[str]) -> None:
        """Remove file by file, until `before` raises for one."""
        for name in names:
            self._before("remove", name)
            self._store.remove([name])

    def __str__(self) -> str:
        return str(self._store)


def peers_in_threads(world_size: int, *, timeout_s: float = 60.0) -> list[Peers]:
    """Return each rank's `Peers`, for ranks that are threads of one process."""
    store = HashStore()
    return [
        Peers(store, global_rank=rank, world_size=world_size, timeout_s=timeout_s)
        for rank in range(world_size)
    ]
