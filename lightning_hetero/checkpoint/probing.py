"""Ask a remote store once, before anything is computed or read, and say what is missing.

Its own operations are tried again for minutes, which is right in the middle of a run and wrong at
its start, where a missing bucket or key is the usual reason. Reasons that may pass by themselves
are left to those tries.
"""

import re
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_hetero.checkpoint.deadlines import Deadline
from lightning_hetero.checkpoint.retry import local_folder
from lightning_hetero.checkpoint.store import FsspecStore
from lightning_hetero.core.errors import CheckpointError

__all__ = ["look_at_store", "probe_store"]

_PATIENCE_S = 5.0
"""Time for a small file: S3 across the world needs 1 s, a role's credentials 1 s more."""
_S3_RETRIES = {"retries": {"max_attempts": 1}}
"""Of the client itself, which would try a refused connection four times before it says so."""
_REFUSED_KEYS = (
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "security token",
)
_UNREACHED = ("EndpointConnectionError", "ConnectTimeoutError", "ConnectionRefused", "ClientConn")


def probe_store(url: str, *, has_served: bool = False, **options: Any) -> None:
    """Write a small file to a remote store and delete it; what is there is listed afterwards.

    Args:
        url: Of the run; local folders aren't asked.
        has_served: Whether this run has used the store before: then one that doesn't answer now is
            left to the patience of its operations.
        **options: For fsspec's filesystem.

    Raises:
        CheckpointError: It won't take checkpoints; the message says whether credentials, their
            rights, the bucket or the endpoint are the reason. Within 10 seconds.
    """
    if local_folder(url) is not None:
        return
    store = _impatient_store(url, options)
    name = f".tmp-probe-{uuid.uuid4().hex}"

    def ask(_: Any) -> None:
        store.write(name, [b"probe"])
        store.remove([name])

    try:
        Deadline(_PATIENCE_S, max_hanging=1).run(ask)
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
        CheckpointError: There isn't, or the store doesn't say. Within 10 seconds.
    """
    if local_folder(url) is not None:
        return
    store = _impatient_store(url, options)
    try:
        Deadline(_PATIENCE_S, max_hanging=1).run(lambda _: store.check_exists())
    except Exception as error:
        # Stores raise their client library's own types.
        reason = _reason(error, has_served=False)
        if isinstance(error, FileNotFoundError):
            reason = "there is no such bucket or folder, or nothing is in it."
        if reason is not None:
            raise CheckpointError(f"Can't read {url}: {reason} ({_innermost(error)})") from error


def _impatient_store(url: str, options: Mapping[str, Any]) -> FsspecStore:
    if url.startswith(("s3://", "s3a://")):
        config = {**_S3_RETRIES, **options.get("config_kwargs", {})}
        options = {**options, "config_kwargs": config}
    return FsspecStore(url, **options)


def _reason(error: BaseException, *, has_served: bool) -> str | None:
    """Return what a user must mend, None where trying again may help."""
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
