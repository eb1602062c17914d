"""Retry a flaky store's operations: a few attempts, with growing pauses, then a clear error.

That is right in the middle of a run and wrong at its start, where a missing bucket or key is the
usual reason: so a store is probed once, before anything is computed or read. Errors that may pass
by themselves are left to the retries.
"""

import errno
import logging
import random
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lightning_hetero.checkpoint.format.blocks import Buffer
from lightning_hetero.checkpoint.peers.deadlines import Followed, HangingError, Operations
from lightning_hetero.checkpoint.places.store import FsspecStore, LocalStore, Store
from lightning_hetero.core.errors import CheckpointError, ConfigurationError
from lightning_hetero.core.process import Progress

__all__ = [
    "RetryPolicy",
    "RetryingStore",
    "local_folder",
    "look_at_store",
    "open_store",
    "probe_store",
]

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
"""Names of client libraries' errors that never pass. An S3 client made without credentials never
looks for them again; one that found them renews them by itself, with errors of other names."""


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
    """Seconds without progress after which a try is given up, above 0."""

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

    It can't help if something is missing, forbidden or full, or without credentials.

    A try that hangs is left to a thread that nobody waits for; if several hang, no more begin until
    one of them returns.

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
        self._operations = Operations(self._policy.stall_s)

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
                return self._operations.run(action)
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
        url: A path, file://..., or a URL that fsspec knows, such as s3://bucket/run.
        retry: When to try again, and when to give up a try; None takes the default policy.
        **options: Options of fsspec's filesystem.

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


_S3_RETRIES = {"retries": {"max_attempts": 1}}
"""Options of the client itself, which would try a refused connection four times otherwise."""
_REFUSED_KEYS = (
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "security token",
)
_UNREACHED = ("EndpointConnectionError", "ConnectTimeoutError", "ConnectionRefused", "ClientConn")


def probe_store(url: str, *, has_served: bool = False, **options: Any) -> None:
    """Write a small file to a remote store, delete it, and list the store.

    Args:
        url: Of the run; local folders aren't asked.
        has_served: Whether this run has used the store before: then one that doesn't answer now is
            left to the patience of its operations.
        **options: For fsspec's filesystem.

    Raises:
        CheckpointError: Within 10 seconds: it takes no checkpoints. The message says whether
            credentials, their rights, the bucket or the endpoint are the reason.
    """
    if local_folder(url) is not None:
        return
    store = _impatient_store(url, options)
    name = f".tmp-probe-{uuid.uuid4().hex}"

    def ask(_: Any) -> None:
        store.write(name, [b"probe"])
        store.remove([name])

    try:
        _impatient_operations().run(ask)
    except Exception as error:
        # Stores raise their client library's own types.
        reason = _reason(error, has_served=has_served)
        if reason is not None:
            raise CheckpointError(
                f"Can't write to {url}: {reason} Refusing to start from step 0 without a place for "
                f"checkpoints. ({_innermost(error)})"
            ) from error


def look_at_store(url: str, **options: Any) -> None:
    """Ask a remote store whether anything is there.

    Args:
        url: Of a run or of a folder of runs; local folders aren't asked.
        **options: For fsspec's filesystem.

    Raises:
        CheckpointError: Within 10 seconds: there is nothing, or the store doesn't answer.
    """
    if local_folder(url) is not None:
        return
    store = _impatient_store(url, options)
    try:
        _impatient_operations().run(lambda _: store.check_exists())
    except Exception as error:
        # Stores raise their client library's own types.
        reason = _reason(error, has_served=False)
        if isinstance(error, FileNotFoundError):
            reason = "there is no such bucket or folder, or nothing is in it."
        if reason is not None:
            raise CheckpointError(f"Can't read {url}: {reason} ({_innermost(error)})") from error


def _impatient_operations() -> Operations:
    # A small file takes S3 across the world 1 s, a role's credentials 1 s more.
    return Operations(5.0, max_hanging=1)


def _impatient_store(url: str, options: Mapping[str, Any]) -> FsspecStore:
    if url.startswith(("s3://", "s3a://")):
        config = {**_S3_RETRIES, **options.get("config_kwargs", {})}
        options = {**options, "config_kwargs": config}
    return FsspecStore(url, **options)


def _reason(error: BaseException, *, has_served: bool) -> str | None:
    """Return what a user must fix; None if trying again may help."""
    text = " ".join(f"{type(item).__name__}: {item}" for item in _chain(error))
    # A status by itself, not digits of a name.
    if any(word in text for word in _REFUSED_KEYS) or re.search(r"\b401\b", text):
        return "the store refuses the credentials. Check the key, the secret and their region."
    if "credential" in text.lower():
        return (
            "no credentials. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or what the store's "
            "own client reads; AWS_METADATA_SERVICE_NUM_ATTEMPTS=10 where a role brings them "
            "late), or give LayerwiseCheckpoint storage_options."
        )
    if "NoSuchBucket" in text or "bucket does not exist" in text.lower():
        return "there is no such bucket. Create it, or correct its name."
    if isinstance(error, PermissionError):
        return "the credentials have no right to write there. Allow putting, reading and deleting."
    if isinstance(error, FileNotFoundError):
        return "there is no such bucket or folder. Create it, or correct its name."
    is_silent = isinstance(error, TimeoutError | ConnectionError) or any(
        word in text for word in _UNREACHED
    )
    if is_silent and not has_served:
        return (
            "the endpoint doesn't answer. Check endpoint_url (or AWS_ENDPOINT_URL), the network "
            "and the proxy of this machine."
        )
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__ or following.__context__


def _innermost(error: BaseException) -> str:
    *_, last = _chain(error)
    return f"{type(last).__name__}: {last}"
