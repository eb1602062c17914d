"""Stores of files: local folders (disk or shared memory) and anything that fsspec reaches.

A write is atomic: a name exists with all its bytes or not at all. Locally that is a temporary file,
fsync, rename, fsync of the folder; on object stores one put, or a multipart upload that is
completed at the end and aborted on failure.
"""

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import fsspec
from fsspec.asyn import AsyncFileSystem

from lightning_hetero.checkpoint.format.blocks import Buffer
from lightning_hetero.checkpoint.peers.deadlines import Followed, Operations
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.process import Progress

__all__ = ["FsspecStore", "LocalStore", "Store"]

_TEMPORARY = ".tmp-"
_FOREIGN = {"lost+found"}
_TRIES = 3
_SYNC_BYTES = 256 << 20
_GENERIC_FIND = AsyncFileSystem._find


class Store(Protocol):
    """Named files. Names use "/" whatever the platform is."""

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        """Create or replace a file with all bytes or, on an error, not at all.

        `chunks` is iterated once for each attempt and must start anew each time.
        """

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
        private: Whether only this user may read what is written.
        stall_s: Seconds without progress after which an operation is given up.
    """

    def __init__(self, root: str | Path, *, private: bool = False, stall_s: float = 300.0) -> None:
        self._root = Path(root).absolute()
        self._folder_mode, self._file_mode = (0o700, 0o600) if private else (0o777, 0o666)
        self._operations = Operations(stall_s)

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        """Write a temporary file, sync it, rename it, sync the folder."""
        self._operations.run(
            lambda progress: self._write(name, Followed(chunks, progress), progress)
        )

    def _write(self, name: str, chunks: Iterable[Buffer], progress: Progress) -> None:
        path = self._root / name
        path.parent.mkdir(self._folder_mode, parents=True, exist_ok=True)
        temporary = path.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
        try:
            with open(temporary, "xb", buffering=0, opener=self._open) as file:
                unsynced = 0
                for chunk in chunks:
                    _write_all(file.fileno(), chunk)
                    unsynced += len(chunk)
                    if unsynced >= _SYNC_BYTES:
                        # Else a slow disk would do all its work in the last call, without progress.
                        os.fdatasync(file.fileno())
                        unsynced = 0
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
        return self._operations.run(lambda progress: self._read(name, start, stop, progress))

    def _read(self, name: str, start: int, stop: int | None, progress: Progress) -> bytes:
        with (self._root / name).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            end = size if stop is None else min(stop, size)
            data = bytearray(max(0, end - start))
            view, done = memoryview(data), 0
            while done < len(data):
                count = os.preadv(file.fileno(), [view[done:]], start + done)
                if count == 0:
                    break
                done += count
                progress.tick()
            return bytes(view[:done])

    def _open(self, path: str, flags: int) -> int:
        return os.open(path, flags, self._file_mode)

    def list(self) -> dict[str, int]:
        """Return all files and their sizes; temporary ones are left out, links are followed.

        Raises:
            OSError: A folder can't be read, so its contents are unknown.
        """
        for tries_left in reversed(range(_TRIES)):
            try:
                return self._operations.run(self._walk)
            except OSError as error:
                # A network filesystem's handle of a file that was replaced: look it up again.
                if error.errno != errno.ESTALE or not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")

    def _walk(self, progress: Progress) -> dict[str, int]:
        found = {}
        folders = [("", self._root, frozenset[tuple[int, int]]())]
        while folders:
            prefix, folder, above = folders.pop()
            try:
                status, entries = folder.stat(), list(os.scandir(folder))
            except FileNotFoundError:
                # Deleted meanwhile, or never made.
                continue
            key = (status.st_dev, status.st_ino)
            for entry in Followed([] if key in above else entries, progress):
                info = None if entry.name.startswith(_TEMPORARY) else _status_of(entry)
                if info is None or entry.name in _FOREIGN:
                    continue
                if stat.S_ISDIR(info.st_mode):
                    folders.append((f"{prefix}{entry.name}/", Path(entry.path), above | {key}))
                else:
                    found[f"{prefix}{entry.name}"] = info.st_size
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

    def __init__(self, url: str, *, multipart_bytes: int = 16 << 20, **options: Any) -> None:
        self._url = url.rstrip("/")
        self._multipart_bytes = multipart_bytes
        try:
            self._fs, self._path = fsspec.core.url_to_fs(self._url, **options)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"Can't open the checkpoint store {url}: {error}") from error

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        """Upload in parts of `multipart_bytes`, the memory it needs; abort on an error."""
        path = f"{self._path}/{name}"
        if isinstance(self._fs, AsyncFileSystem):
            self._upload(path, chunks)
        else:
            self._write_and_move(path, chunks)

    def _upload(self, path: str, chunks: Iterable[Buffer]) -> None:
        """Write to an object store, where a file exists once it is closed."""
        file = self._fs.open(path, "wb", block_size=self._multipart_bytes)
        try:
            for chunk in chunks:
                file.write(chunk)
        except BaseException:
            # close() would complete the upload of a torn file.
            with contextlib.suppress(Exception):
                file.discard()
            file.closed = True
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
        if isinstance(self._fs, AsyncFileSystem) and type(self._fs)._find is not _GENERIC_FIND:
            try:
                found = self._fs.find(self._path, detail=True)
            except FileNotFoundError:
                return {}
        else:
            found = {info["name"]: info for info in self._walk()}
        return {
            name.lstrip("/").removeprefix(root).lstrip("/"): info["size"]
            for name, info in found.items()
            if not name.rpartition("/")[2].startswith(_TEMPORARY)
        }

    def _walk(self) -> Iterator[Mapping[str, Any]]:
        """Yield all files; unlike fsspec's own walk it raises if a folder can't be read."""
        folders = [self._path]
        while folders:
            folder = folders.pop()
            with contextlib.suppress(FileNotFoundError):
                for info in self._fs.ls(folder, detail=True):
                    if info["type"] != "directory":
                        yield info
                    elif info["name"].rstrip("/") != folder:
                        folders.append(info["name"].rstrip("/"))

    def remove(self, names: Collection[str]) -> None:
        """Delete objects in bulk: object stores take a thousand with one request."""
        paths = [f"{self._path}/{name}" for name in names]
        if not paths:
            return
        try:
            self._fs.rm(paths)
        except FileNotFoundError:
            # Some filesystems stop at the first missing file.
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(path)
        if not isinstance(self._fs, AsyncFileSystem):
            self._remove_empty({path.rpartition("/")[0] for path in paths} - {self._path})

    def _remove_empty(self, folders: Collection[str]) -> None:
        """Delete folders that are empty; object stores have no folders."""
        self._fs.invalidate_cache()
        for folder in folders:
            # Some filesystems' `rmdir` would delete files, too.
            with contextlib.suppress(OSError):
                if not self._fs.ls(folder, detail=False):
                    self._fs.rmdir(folder)

    def __str__(self) -> str:
        return self._url


def _status_of(entry: "os.DirEntry[str]") -> os.stat_result | None:
    """Return the status of what an entry, perhaps a link, leads to; None if to nothing."""
    try:
        return entry.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise


def _write_all(descriptor: int, chunk: Buffer) -> None:
    view = memoryview(chunk).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
