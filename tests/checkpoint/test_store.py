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
    RetryingStore,
    Source,
    Store,
    Tier,
    TierKind,
    open_store,
    recover,
)
from lightning_hetero.checkpoint import store as local
from lightning_hetero.core.errors import CheckpointError
from tests.callbacks.servers import S3Server
from tests.checkpoint.stand_ins import MemoryStore
from tests.checkpoint.states import PLANS, assert_is_state, contents, needs_of


@pytest.fixture(scope="module")
def s3_options(s3: S3Server) -> dict[str, Any]:
    """Give the options that reach the S3 server."""
    return s3.options(s3.port)


@pytest.fixture(params=["local", "memory", "fsspec-memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return LocalStore(tmp_path)
    if request.param == "memory":
        return MemoryStore()
    if request.param == "fsspec-memory":
        return FsspecStore(f"memory://{tmp_path.name}")
    return s3_store(request.getfixturevalue("s3_options"), tmp_path.name.replace("_", "-").lower())


def s3_store(options: dict[str, Any], bucket: str) -> FsspecStore:
    found = FsspecStore(f"s3://{bucket}/run", **options)
    with contextlib.suppress(FileExistsError):
        found._fs.mkdir(bucket)
    return found


def test_a_written_file_is_read_back_whole_and_in_part(store: Store) -> None:
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


@pytest.mark.parametrize("size_mib", [1, 12])
def test_a_write_that_fails_half_way_leaves_nothing(store: Store, size_mib: int) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(size_mib):
            yield os.urandom(1 << 20)
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        store.write("a/b.bin", chunks())
    assert store.list() == {}


def test_a_failed_write_keeps_the_earlier_file(store: Store) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"new"
        raise ConnectionError("gone")

    store.write("a/b.bin", [b"old"])
    with pytest.raises(ConnectionError):
        store.write("a/b.bin", chunks())
    assert store.read("a/b.bin") == b"old"


def test_an_empty_place_lists_nothing(tmp_path: Path) -> None:
    assert LocalStore(tmp_path / "none").list() == {}
    assert FsspecStore("memory://no/such/place").list() == {}


def test_large_files_go_to_s3_in_parts(s3_options: dict[str, Any]) -> None:
    store = s3_store(s3_options, "large")
    data = os.urandom(35 << 20)
    store.write("x/y", [data[i : i + (1 << 20)] for i in range(0, len(data), 1 << 20)])
    assert store.list() == {"x/y": len(data)}
    assert store.read("x/y", 5 << 20, 6 << 20) == data[5 << 20 : 6 << 20]


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
    assert set(recovered.report.bytes_by_source) == {Source.REMOTE}


def test_a_refused_connection_to_s3_is_a_checkpoint_error() -> None:
    pytest.importorskip("s3fs")
    store = RetryingStore(
        FsspecStore(
            "s3://bucket/run",
            key="k",
            secret="s",
            endpoint_url="http://127.0.0.1:9",
            config_kwargs={"retries": {"max_attempts": 0}, "connect_timeout": 1},
        ),
        attempts=2,
        pause_s=0.0,
    )
    with pytest.raises(CheckpointError, match=r"s3://bucket/run in 2 attempts"):
        store.write("x", [b"1"])


def test_urls_and_paths_open_the_right_store(tmp_path: Path) -> None:
    assert isinstance(open_store(tmp_path), LocalStore)
    assert str(open_store(f"file://{tmp_path}")) == str(tmp_path)
    assert isinstance(open_store("memory://x"), RetryingStore)
    with pytest.raises(CheckpointError, match="nosuch"):
        open_store("nosuch://x")


def test_removing_the_last_file_removes_the_folder_and_leftovers(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.write("a/b", [b"1"])
    (tmp_path / "a" / ".tmp-leftover").write_bytes(b"torn")
    assert store.list() == {"a/b": 1}
    store.remove(["a/b"])
    assert list(tmp_path.iterdir()) == []


def test_links_are_followed_and_those_that_lead_nowhere_left_out(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    store.write("step-1/x", [b"1"])
    (tmp_path / "run/step-1").rename(tmp_path / "elsewhere")
    (tmp_path / "run/step-1").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run/loop").symlink_to(tmp_path / "run/loop")
    (tmp_path / "run/gone").symlink_to(tmp_path / "nothing")
    assert store.list() == {"step-1/x": 1}


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
    store = FsspecStore("memory://fails/inside")
    store.write("step-1/x", [b"1"])
    assert store.list() == {"step-1/x": 1}
    ls = MemoryFileSystem.ls

    def failing(self: MemoryFileSystem, path: str, **options: Any) -> Any:
        if path.endswith("step-1"):
            raise OSError(errno.EIO, "gone")
        return ls(self, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "ls", failing)
    with pytest.raises(OSError, match="gone"):
        store.list()


def test_a_large_file_is_synced_piece_by_piece_so_that_a_slow_disk_is_seen_to_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(local, "_SYNC_BYTES", 10)
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(os.fstat(fd).st_size))
    LocalStore(tmp_path).write("x", [b"1234567"] * 5)
    assert synced == [14, 28]
    assert LocalStore(tmp_path).read("x") == b"1234567" * 5
