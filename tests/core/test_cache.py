"""Files that are written whole."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from lightning_hetero.core.process import write_whole


def test_threads_that_write_one_file_at_once_each_write_it_whole(tmp_path: Path) -> None:
    path, at_once = tmp_path / "profile.json", Barrier(2)

    def write(text: str) -> None:
        def write_halves(new: Path) -> None:
            with new.open("w") as file:
                for half in (text[:4], text[4:]):
                    file.write(half)
                    file.flush()
                    at_once.wait(timeout=60)

        write_whole(path, write_halves)

    texts = ["a" * 8, "bb" * 8]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write, texts))
    assert path.read_text() in texts
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_file_as_it_was_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "profile.json"
    write_whole(path, lambda new: new.write_text("whole"))

    def fail(new: Path) -> None:
        new.write_text("hal")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        write_whole(path, fail)
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]
