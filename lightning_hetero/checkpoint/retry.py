"""How long a flaky store is given: a few attempts, with growing pauses, then a clear error."""

import errno
import logging
import random
import re
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lightning_hetero.checkpoint.deadlines import Deadline, Followed, HangingError, Progress
from lightning_hetero.checkpoint.store import Buffer, FsspecStore, LocalStore, Store
from lightning_hetero.core.errors import CheckpointError, ConfigurationError

__all__ = ["RetryPolicy", "RetryingStore", "local_folder", "open_store"]

_log = logging.getLogger(__name__)
# Of its own: waiting for a store must not change the numbers that a seeded run draws.
_jitter = random.Random()
_T = TypeVar("_T")

_HOPELESS = (
    FileNotFoundError,
    PermissionError,
    NotADirectoryError,
    IsADirectoryError,
    HangingError,
)
_HOPELESS_NUMBERS = {errno.ENOSPC, errno.EROFS, errno.EDQUOT}
_HOPELESS_NAMES = {"NoCredentialsError"}
"""Of client libraries. An S3 client that was made without credentials never looks for them again;
one that found them renews them by itself, and what fails there has other names."""


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """When to try again."""

    attempts: int = 5
    """Tries in all, 1 or more."""
    first_pause_s: float = 0.5
    """Pause before the second try, seconds; doubles with each further one, ± half at random."""
    longest_pause_s: float = 20.0
    """Bound of the pause, seconds."""
    stall_s: float = 300.0
    """Seconds after which a try in which nothing moves is given up, above 0."""

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first_pause_s < 0 or self.longest_pause_s < 0:
            raise ConfigurationError(f"{self} needs attempts of 1 or more and pauses of 0 or more.")
        if self.stall_s <= 0:
            raise ConfigurationError(f"{self} needs a stall_s above 0.")

    def pause_s(self, failures: int) -> float:
        """Return the pause after that many failures."""
        pause = min(self.longest_pause_s, self.first_pause_s * 2.0 ** (failures - 1))
        return pause * _jitter.uniform(0.5, 1.5)


class RetryingStore:
    """A store that tries again, unless trying again can't help.

    It can't where something is missing, forbidden or full, or where there are no credentials.

    A try that hangs is left to a thread that nobody waits for; where several hang, no more begin
    until one of them returns.

        store = RetryingStore(FsspecStore("s3://bucket/run"), RetryPolicy(attempts=8))
        store.write("a/b.bin", [b"some", b"bytes"])
        store.list()  # {"a/b.bin": 9}
    """

    def __init__(
        self,
        store: Store,
        policy: RetryPolicy | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._policy = policy or RetryPolicy()
        self._sleep = sleep
        self._deadline = Deadline(self._policy.stall_s)

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        """Write, again from the first chunk after a failure."""
        self._retry(
            f"write {name} to",
            lambda progress: self._store.write(name, Followed(chunks, progress)),
        )

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read a byte range."""
        return self._retry(f"read {name} from", lambda _: self._store.read(name, start, stop))

    def list(self) -> dict[str, int]:
        """List all files."""
        return self._retry("list", lambda _: self._store.list())

    def remove(self, names: Collection[str]) -> None:
        """Delete files."""
        self._retry(f"remove {len(names)} files from", lambda _: self._store.remove(names))

    def _retry(self, what: str, action: Callable[[Progress], _T]) -> _T:
        for failures in range(1, self._policy.attempts + 1):
            try:
                return self._deadline.run(action)
            except Exception as error:
                # Stores raise their client library's own types, so no narrower class will do.
                if _is_hopeless(error):
                    raise
                if failures == self._policy.attempts:
                    raise CheckpointError(
                        f"Couldn't {what} {self._store} in {failures} attempts: {error!r}. Check "
                        "that it is reachable and that it answers."
                    ) from error
                pause_s = self._policy.pause_s(failures)
                _log.warning("Retrying to %s %s in %.1f s: %r", what, self._store, pause_s, error)
                self._sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    def __str__(self) -> str:
        return str(self._store)


def _is_hopeless(error: Exception) -> bool:
    return (
        isinstance(error, _HOPELESS)
        or getattr(error, "errno", None) in _HOPELESS_NUMBERS
        or type(error).__name__ in _HOPELESS_NAMES
    )


def open_store(url: str | Path, *, retry: RetryPolicy | None = None, **options: Any) -> Store:
    """Return a store for a path or URL: local folders try once, others with retries.

    Args:
        url: A path, file://..., or what fsspec knows, such as s3://bucket/run.
        retry: When to try again, and when to give up a try; the default policy if None.
        **options: For fsspec's filesystem.

    Raises:
        CheckpointError: fsspec doesn't know the URL, or its package is missing.
    """
    retry = retry or RetryPolicy()
    if local_folder(url) is None:
        return RetryingStore(FsspecStore(str(url), **options), retry)
    return LocalStore(_without_scheme(url), stall_s=retry.stall_s)


def local_folder(url: str | Path) -> Path | None:
    """Return the absolute folder that a path or a file:// URL names; None for other URLs."""
    text = _without_scheme(url)
    return None if re.match(r"\w[\w+.-]*://", text) else Path(text).resolve()


def _without_scheme(url: str | Path) -> str:
    return str(url).removeprefix("file://")
