"""Stores write whole files or none: on disk, in memory, and on a real S3 server."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_hetero.checkpoint import (
    CheckpointWriter,
    FsspecStore,
    LocalStore,
    Source,
    Store,
    Tier,
    TierKind,
    open_store,
)
from tests.callbacks.servers import S3Server
from tests.checkpoint.states import PLANS, assert_is_state, contents, needs_of, recover


@pytest.fixture(scope="module")
def s3_options(s3: S3Server) -> dict[str, Any]:
    """Give the options that reach the S3 server."""
    return s3.options(s3.port)


@pytest.fixture(params=["local", "fsspec-memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return LocalStore(tmp_path)
    if request.param == "fsspec-memory":
        return FsspecStore(f"memory://{tmp_path.name}")
    return s3_store(request.getfixturevalue("s3_options"), tmp_path.name.replace("_", "-").lower())


def s3_store(options: dict[str, Any], bucket: str) -> FsspecStore:
    found = FsspecStore(f"s3://{bucket}/run", **options)
    with contextlib.suppress(FileExistsError):
        found._fs.mkdir(bucket)
    return found


def test_a_written_file_is_read_back_whole_and_in_part(store: Store) -> None:
    assert store.list() == {}
    data = os.urandom(100_000)
    store.write("a/b.bin", [data[:7], data[7:50_000], data[50_000:]])
    store.write("c.bin", [b"x"])
    assert store.read("a/b.bin") == data
    assert store.read("a/b.bin", 6, 50_001) == data[6:50_001]
    assert store.read("a/b.bin", 99_999, 100_000) == data[-1:]
    assert store.read("a/b.bin", 5, 5) == b""
    assert store.list() == {"a/b.bin": 100_000, "c.bin": 1}
    store.write("c.bin", [b"yz"])
    assert store.read("c.bin") == b"yz"
    store.write("d.bin", [b"x"])
    store.remove(["d.bin", "a/b.bin"])
    store.remove(["a/b.bin", "c/none.bin"])
    store.remove([])
    assert store.list() == {"c.bin": 2}
    with pytest.raises(OSError, match=r"a/b|No such|does not exist"):
        store.read("a/b.bin")


@pytest.mark.parametrize("size_mib", [1, 20])
def test_a_write_that_fails_half_way_leaves_nothing_or_what_was_there(
    store: Store, size_mib: int
) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(size_mib):
            yield os.urandom(1 << 20)
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        store.write("a/b.bin", chunks())
    assert store.list() == {}
    store.write("a/b.bin", [b"old"])
    with pytest.raises(ConnectionError):
        store.write("a/b.bin", chunks())
    assert store.list() == {"a/b.bin": 3}


def test_a_checkpoint_goes_through_s3(s3_options: dict[str, Any]) -> None:
    plan, size = PLANS["one device"]
    s3_store(s3_options, "runs")

    def tiers() -> list[Tier]:
        return [Tier(kind=TierKind.REMOTE, store=open_store("s3://runs/one", **s3_options), keep=1)]

    for step in (1, 2):
        writer = CheckpointWriter(tiers())
        assert writer.save(contents(step, plan, size)[0]).wait_until_uploaded(60)
        writer.close()
    names = open_store("s3://runs/one", **s3_options).list()
    assert names
    assert all(name.startswith("step-000000000002") for name in names), "step 1 was to be pruned"
    needs = needs_of(0, plan, size)
    recovered = recover(needs, tiers())
    assert_is_state(recovered, needs, 2)
    assert recovered is not None
    assert set(recovered.bytes_by_source) == {Source.REMOTE}


def test_removing_the_last_file_removes_the_folder_and_leftovers(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.write("a/b", [b"1"])
    (tmp_path / "a" / ".tmp-leftover").write_bytes(b"torn")
    assert store.list() == {"a/b": 1}
    store.remove(["a/b"])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_listed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, scan = LocalStore(tmp_path), os.scandir

    def scandir(path: Any) -> Any:
        if Path(path).name == "step-1":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return scan(path)

    store.write("step-1/x", [b"1"])
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(OSError, match="step-1"):
        store.list()
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        LocalStore(tmp_path / "file").list()


def test_a_filesystem_that_fails_inside_a_folder_is_no_empty_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unlike fsspec's own walk says."""
    store, ls = FsspecStore("memory://fails/inside"), MemoryFileSystem.ls

    def failing(self: MemoryFileSystem, path: str, **options: Any) -> Any:
        if path.endswith("step-1"):
            raise OSError(errno.EIO, "gone")
        return ls(self, path, **options)

    store.write("step-1/x", [b"1"])
    monkeypatch.setattr(MemoryFileSystem, "ls", failing)
    with pytest.raises(OSError, match="gone"):
        store.list()
