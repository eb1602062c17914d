"""Stores of files: local folders (disk or shared memory) and anything that fsspec reaches.

A write is atomic: a name exists with all its bytes or not at all. Locally that is a temporary file,
fsync, rename, fsync of the folder; on object stores one put, or a multipart upload that is
completed at the end and aborted on failure.
"""

import contextlib
import errno
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem

from lightning_hetero.checkpoint.deadlines import Followed, HangingError, Operations
from lightning_hetero.checkpoint.manifest import Buffer
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.process import Progress

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_TEMPORARY = ".tmp-"
_SYNC_BYTES = 256 << 20
_MULTIPART_BYTES = 16 << 20
_HOPELESS = {errno.ENOSPC, errno.EROFS, errno.EDQUOT}
_PROBE_S = 10.0


class Store(Protocol):
    """Named files. Names use "/" whatever the platform is."""

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        """Create or replace a file with all bytes, or none on an error; may iterate again."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of a file, fewer if it ends before; OSError if missing."""

    def list(self) -> dict[str, int]:
        """Return all files and their sizes in bytes."""

    def remove(self, names: Collection[str]) -> None:
        """Delete files, all at once where the store can; those that aren't there don't matter."""


class LocalStore:
    """A folder on a local disk, or in /dev/shm, where files survive the process.

    An operation that hangs, such as on a network mount without its server, raises TimeoutError.

        store = LocalStore("/mnt/scratch/run")
        store.write("a/b.bin", [b"some", b"bytes"])
        assert store.read("a/b.bin", 2, 6) == b"meby"

    Args:
        root: The folder; a relative path is resolved now, against the working directory.
        stall_s: Seconds without progress after which an operation is given up.
    """

    def __init__(self, root: str | Path, *, stall_s: float = 300.0) -> None:
        self._root = Path(root).absolute()
        self._operations = Operations(stall_s)

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        """Write a temporary file, sync it, rename it, sync the folder."""
        self._operations.run(
            lambda progress: self._write(name, Followed(chunks, progress), progress)
        )

    def _write(self, name: str, chunks: Iterable[Buffer], progress: Progress) -> None:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
        try:
            with temporary.open("xb") as file:
                unsynced = 0
                for chunk in chunks:
                    file.write(chunk)
                    unsynced += len(chunk)
                    if unsynced >= _SYNC_BYTES:
                        # Else a slow disk would do all its work in the last call, without progress.
                        file.flush()
                        os.fdatasync(file.fileno())
                        unsynced = 0
                file.flush()
                os.fsync(file.fileno())
            progress.refuse_if_late()
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of a file."""

        def take(_: Progress) -> bytes:
            with (self._root / name).open("rb") as file:
                file.seek(start)
                return file.read(-1 if stop is None else max(0, stop - start))

        return self._operations.run(take)

    def list(self) -> dict[str, int]:
        """Return all files and their sizes; temporary ones are left out, links are followed.

        Raises:
            OSError: A folder can't be read, so its contents are unknown.
        """
        return self._operations.run(self._walk)

    def _walk(self, progress: Progress) -> dict[str, int]:
        def fail(error: OSError) -> None:
            # Folders may be deleted meanwhile, or never have been made.
            if not isinstance(error, FileNotFoundError):
                raise error

        found = {}
        for folder, folders, names in os.walk(self._root, onerror=fail, followlinks=True):
            progress.tick()
            folders[:] = [name for name in folders if name != "lost+found"]
            for name in names:
                path = Path(folder, name)
                size = None if name.startswith(_TEMPORARY) else _size_of(path)
                if size is not None:
                    found[path.relative_to(self._root).as_posix()] = size
        return found

    def remove(self, names: Collection[str]) -> None:
        """Delete files, and each folder with its last file, temporary leftovers included."""
        self._operations.run(lambda progress: self._remove(names, progress))

    def _remove(self, names: Collection[str], progress: Progress) -> None:
        paths = [self._root / name for name in names]
        for path in Followed(paths, progress):
            path.unlink(missing_ok=True)
        for folder in {path.parent for path in paths} - {self._root}:
            with contextlib.suppress(OSError):
                left = list(folder.iterdir())
                if all(path.name.startswith(_TEMPORARY) for path in left):
                    for leftover in left:
                        leftover.unlink(missing_ok=True)
                    folder.rmdir()

    def __str__(self) -> str:
        return str(self._root)


class FsspecStore:
    """Files below a URL of any fsspec filesystem, such as s3://bucket/run or gs://bucket/run.

        store = FsspecStore("s3://bucket/run", endpoint_url="http://minio:9000")
        store.write("a/b.bin", [b"some", b"bytes"])
        store.remove(["a/b.bin"])

    `open_store` wraps it in a `RetryingStore`.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._url = url.rstrip("/")
        try:
            self._fs, self._path = fsspec.core.url_to_fs(self._url, **options)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"Can't open the checkpoint store {url}: {error}") from error

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        """Upload in parts of 16 MiB, the memory it needs; abort on an error."""
        path = f"{self._path}/{name}"
        if not isinstance(self._fs, AsyncFileSystem):
            self._write_and_move(path, chunks)
            return
        # On an object store a file exists once it is closed.
        file = self._fs.open(path, "wb", block_size=_MULTIPART_BYTES)
        try:
            for chunk in chunks:
                file.write(chunk)
        except BaseException:
            with contextlib.suppress(Exception):
                file.discard()
            file.closed = True  # Else it would complete the upload of a torn file.
            raise
        file.close()

    def _write_and_move(self, path: str, chunks: Iterable[Buffer]) -> None:
        """Write to a filesystem with folders, under another name until all bytes are there."""
        folder = path.rpartition("/")[0]
        temporary = f"{folder}/{_TEMPORARY}{uuid.uuid4().hex}"
        self._fs.makedirs(folder, exist_ok=True)
        try:
            with self._fs.open(temporary, "wb") as file:
                for chunk in chunks:
                    file.write(chunk)
            self._fs.mv(temporary, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    def check_exists(self) -> None:
        """Raise FileNotFoundError if nothing is below the URL; one small request."""
        self._fs.invalidate_cache()
        self._fs.info(self._path)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Fetch one byte range."""
        if stop is not None and stop <= start:
            return b""
        return bytes(self._fs.cat_file(f"{self._path}/{name}", start=start, end=stop))

    def list(self) -> dict[str, int]:
        """List everything below the URL, past fsspec's cache."""
        self._fs.invalidate_cache()
        root = self._path.lstrip("/")
        try:
            if isinstance(self._fs, AsyncFileSystem):
                found = self._fs.find(self._path, detail=True)
            else:
                found = self._walk(self._path)
        except FileNotFoundError:
            return {}
        return {
            name.lstrip("/").removeprefix(root).lstrip("/"): info["size"]
            for name, info in found.items()
            if not name.rpartition("/")[2].startswith(_TEMPORARY)
        }

    def _walk(self, folder: str) -> dict[str, Any]:
        """Return all files; unlike fsspec's own walk it raises if a folder can't be read."""
        found = {}
        for info in self._fs.ls(folder, detail=True):
            name = info["name"].rstrip("/")
            if info["type"] != "directory":
                found[name] = info
            elif name != folder:
                found |= self._walk(name)
        return found

    def remove(self, names: Collection[str]) -> None:
        """Delete objects in bulk: object stores take a thousand with one request."""
        paths = [f"{self._path}/{name}" for name in names]
        if not paths:
            return
        try:
            self._fs.rm(paths)
        except FileNotFoundError:
            # Some filesystems stop at the first missing file, so each is removed by itself.
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(path)

    def __str__(self) -> str:
        return self._url


class RetryingStore:
    """A store whose operations are tried again, after growing pauses, and given up if they hang.

    What is missing, forbidden or full isn't tried again. If several operations hang, no more begin
    until one of them returns.

    Args:
        store: The store.
        attempts: Tries in all.
        pause_s: Pause before the second try, seconds; doubles with each further one.
        stall_s: Seconds without progress after which a try is given up.
    """

    def __init__(
        self, store: Store, *, attempts: int = 3, pause_s: float = 0.5, stall_s: float = 300.0
    ) -> None:
        self._store = store
        self._attempts = attempts
        self._pause_s = pause_s
        self._operations = Operations(stall_s)

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        """Write, again from the first chunk after a failure."""
        self._retry(f"write {name} to", lambda it: self._store.write(name, Followed(chunks, it)))

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
        for failures in range(1, self._attempts + 1):
            try:
                return self._operations.run(action)
            except Exception as error:
                # Stores raise their client library's own types, so no narrower class will do.
                is_known = isinstance(error, HangingError | FileNotFoundError | PermissionError)
                if is_known or getattr(error, "errno", None) in _HOPELESS:
                    raise
                if failures == self._attempts:
                    raise CheckpointError(
                        f"Couldn't {what} {self._store} in {failures} attempts: {error!r}. Check "
                        "that it is reachable and that it answers."
                    ) from error
                _log.warning("Trying again to %s %s: %r", what, self._store, error)
                time.sleep(self._pause_s * 2.0 ** (failures - 1))
        raise AssertionError("the last attempt returns or raises")

    def __str__(self) -> str:
        return str(self._store)


def open_store(url: str | Path, *, stall_s: float = 300.0, **options: Any) -> Store:
    """Return a store for a path or URL; operations of remote ones are tried several times.

    Args:
        url: A path, file://..., or a URL that fsspec knows, such as s3://bucket/run.
        stall_s: Seconds without progress after which an operation is given up.
        **options: Options of fsspec's filesystem.

    Raises:
        CheckpointError: fsspec doesn't know the URL, or its package is missing.
    """
    folder = local_folder(url)
    if folder is not None:
        return LocalStore(folder, stall_s=stall_s)
    return RetryingStore(FsspecStore(str(url), **options), stall_s=stall_s)


def local_folder(url: str | Path) -> Path | None:
    """Return the absolute folder that a path or a file:// URL names; None for other URLs."""
    text = str(url).removeprefix("file://")
    return None if re.match(r"\w[\w+.-]*://", text) else Path(text).resolve()


def check_store(url: str, *, writes: bool, **options: Any) -> None:
    """Ask a remote store once whether it takes files, or whether anything is there.

    Args:
        url: Of a run; local folders aren't asked.
        writes: Whether to write a small file there, and delete it; else something must be there.
        **options: For fsspec's filesystem.

    Raises:
        CheckpointError: Within 10 seconds: it doesn't answer, or refuses.
    """
    if local_folder(url) is not None:
        return

    def ask(_: Progress) -> None:
        store, name = FsspecStore(url, **options), f"{_TEMPORARY}{uuid.uuid4().hex}"
        if writes:
            store.write(name, [b"probe"])
            store.remove([name])
        else:
            store.check_exists()

    try:
        Operations(_PROBE_S).run(ask)
    except Exception as error:
        raise CheckpointError(
            f"Can't {'write to' if writes else 'read'} {url}: {error!r}. Check the bucket's name, "
            "the credentials and their rights, the endpoint, and this machine's network."
        ) from error


def _size_of(path: Path) -> int | None:
    """Return a file's size; None if it has gone, as a network filesystem may only learn now."""
    try:
        return path.stat().st_size
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE, errno.ELOOP):
            return None
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
