"""Laws of `lightning-hetero stragglers`: every event shows."""

import os
import subprocess
import sys

import pytest

from lightning_hetero.cli import main
from lightning_hetero.core.event_log import append_event
from lightning_hetero.straggler.events import to_entry
from tests.straggler.sample_events import EVENTS


@pytest.fixture
def log_path(tmp_path):
    path = tmp_path / "events.jsonl"
    for event in EVENTS:
        append_event(path, **to_entry(event))
    return path


def test_the_table_shows_every_event(log_path, capsys):
    assert main(["stragglers", str(log_path)]) == 0
    output = capsys.readouterr().out
    assert "60 iterations, steps 0 to 59, median 1 s" in output
    assert "pipeline 1 slowed 2.0× (since step 40)" in output
    assert "the link between ranks 1 and 2 is 3.0× slower" in output
    assert "swapped places of ranks 2 ↔ 3, iteration 2.00 s → 1.00 s" in output


def test_a_reader_that_has_seen_enough_is_no_error(log_path):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "lightning_hetero.cli", "stragglers", log_path]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=True)
    os.close(writing)
    assert done.stderr == b""


def test_what_cannot_be_read_is_one_line_and_exit_code_2(tmp_path, capsys):
    assert main(["stragglers", str(tmp_path / "none.jsonl")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_empty_log_says_so(tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    assert main(["stragglers", str(tmp_path / "empty.jsonl")]) == 0
    assert "no events" in capsys.readouterr().out
