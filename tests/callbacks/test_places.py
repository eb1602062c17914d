"""What a node kept in shared memory belongs to one user and one run; nodes are told apart."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero.callbacks.checkpointing import places
from lightning_hetero.callbacks.checkpointing.places import FinishedStep, Places, take_leases
from lightning_hetero.checkpoint import (
    Peers,
    TierKind,
)
from lightning_hetero.checkpoint.claims import OWNER_FILE, OccupiedError
from lightning_hetero.cli import main
from lightning_hetero.core.errors import ConfigurationError


@pytest.fixture(autouse=True)
def _memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(places, "SHARED_MEMORY", tmp_path / "shm")


def at(path: str | None, local_dir: str | None = None, **options: Any) -> Places:
    return Places(
        path_or_url=path,
        local_dir=local_dir,
        shared_memory=True,
        keep=1,
        storage_options=options,
    )


def test_runs_in_other_folders_or_stores_have_memory_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        nodes = [at("outputs"), at(None, "outputs"), at("s3://bucket/run", "outputs")]
        found += [node.memory_dir for node in nodes]
    found.append(at("s3://bucket/run").memory_dir)
    found.append(at("s3://bucket/run", endpoint_url="http://other").memory_dir)
    assert len(set(found)) == len(found)
    # However the folder is named, a run that is started again finds its own.
    assert at(str(tmp_path / "two/outputs")).memory_dir == at("outputs").memory_dir
    assert at("file://" + str(tmp_path / "two/outputs")).memory_dir == at("outputs").memory_dir


def test_what_failed_runs_left_in_memory_is_freed_after_a_week(tmp_path: Path) -> None:
    left, other, own = at("s3://bucket/left"), at("s3://bucket/other"), at("s3://bucket/own")
    for node in (left, other, own):
        node.tiers()[0].store.write("step-1/layer", [b"x"])
    eight_days_ago_s = time.time() - 8 * 86400
    for node in (left, own):
        assert node.memory_dir is not None
        for path in (node.memory_dir, *node.memory_dir.rglob("*")):
            os.utime(path, (eight_days_ago_s, eight_days_ago_s))
    _, leases = take_leases(own, Peers(), is_first_of_node=True)
    for lease in leases:
        lease.release()
    assert [node.memory_dir.exists() for node in (left, other, own)] == [False, True, True]
    assert main(["checkpoint", "prune", "--memory", "0"]) == 0
    assert not other.memory_dir.exists()
    assert main(["checkpoint", "prune", "--memory", "0", "--keep", "1", "here"]) == 2


def test_nobody_else_reads_or_makes_what_is_in_shared_memory(tmp_path: Path) -> None:
    node = at("s3://bucket/run")
    memory = node.tiers()[0].store
    memory.write("step-1/layer", [b"secret"])
    (folder,) = (tmp_path / "shm").iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    folder.rename(tmp_path / "foreign")
    folder.symlink_to(tmp_path / "foreign")
    with pytest.raises(ConfigurationError, match=r"can't be trusted.*shared_memory=False"):
        node.tiers()
    folder.unlink()
    folder.mkdir()
    owner = os.getuid() + 1
    try:
        os.chown(folder, owner, -1)
    except PermissionError:
        return
    with pytest.raises(ConfigurationError, match=f"the id {owner}"):
        node.tiers()


def test_two_machines_of_one_name_are_two_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = at(None, str(tmp_path / "one")), at(None, str(tmp_path / "other"))
    name = one.node
    assert at(None, str(tmp_path / "one")).node == name
    # Two disks, or two machines that have the same path.
    assert other.node != name
    monkeypatch.setattr(places, "machine_namespace", lambda: "another boot")
    assert one.node != name


def test_whoever_leaves_or_can_not_enter_holds_no_place(tmp_path: Path) -> None:
    node = at(str(tmp_path / "remote"), str(tmp_path / "disk"))
    files = [tmp_path / name / OWNER_FILE for name in ("remote", "disk")]
    _, leases = take_leases(node, Peers(), is_first_of_node=True)
    assert all(file.exists() for file in files)
    for lease in leases:
        lease.raise_if_lost()
    leases[0]._taken_over_by = {"host": "thief"}
    with pytest.raises(OccupiedError, match="thief"):
        leases[0].raise_if_lost()
    leases[0]._taken_over_by = None
    for lease in leases:
        lease.release()
    assert not any(file.exists() for file in files)


def test_a_note_that_is_cut_short_or_does_not_fit_costs_no_step_and_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank is killed while it notes its step: its node still knows the step before."""
    node, before = at(None, str(tmp_path / "disk")), FinishedStep(step=3, at_s=1.0, run="run")
    node.tiers()
    node.note(before)

    def dies(self: Path, text: str) -> int:
        self.open("w").close()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", dies)
        node.note(FinishedStep(step=4, at_s=2.0, run="run"))
    assert node.last_finished() == before
    (node.memory_dir / "progress.json").write_text("[1]")
    assert node.last_finished() is None


def test_shared_memory_that_nobody_may_write_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = at(None, str(tmp_path / "disk"))
    assert len(node.tiers()) == 2
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "shm")
    assert [tier.kind for tier in node.tiers()] == [TierKind.DISK]
