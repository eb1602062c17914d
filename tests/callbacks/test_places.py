"""What a node kept in shared memory belongs to one run, and goes with its folder."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero.callbacks import places
from lightning_hetero.callbacks.places import FinishedStep, Places


@pytest.fixture(autouse=True)
def _memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(places, "_SHARED_MEMORY", tmp_path / "shm")


def at(path: str | None, local_dir: str | None = None, **options: Any) -> Places:
    return Places(
        path_or_url=path,
        local_dir=local_dir,
        shared_memory=True,
        keep=1,
        storage_options=options,
        retry=None,
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


@pytest.mark.parametrize("local", [False, True])
def test_memory_is_forgotten_where_the_folder_was_deleted(tmp_path: Path, *, local: bool) -> None:
    folder = str(tmp_path / "run")
    node = at("s3://bucket/run", folder) if local else at(folder)
    assert node.is_new
    node.begin_anew()
    node.note(FinishedStep(step=3, at_s=1.0))
    assert not node.is_new
    assert node.last_finished() == FinishedStep(step=3, at_s=1.0)
    shutil.rmtree(folder)
    assert node.is_new
    node.begin_anew()
    assert node.last_finished() is None


def test_memory_stays_where_everything_else_is_remote() -> None:
    assert not at("s3://bucket/run").is_new
