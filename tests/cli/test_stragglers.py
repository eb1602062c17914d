"""Laws of `lightning-hetero stragglers`: every event shows, the picture is drawn."""

import os
import subprocess
import sys

import pytest

from lightning_hetero.cli import main
from lightning_hetero.cli.stragglers import plot_events
from lightning_hetero.straggler import EventLog, FindingEvent, FindingKind, IterationEvent
from tests.straggler.sample_events import EVENTS


@pytest.fixture
def log_path(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    for event in EVENTS:
        log.write(event)
    return path


def test_the_table_shows_every_event(log_path, capsys):
    assert main(["stragglers", str(log_path)]) == 0
    output = capsys.readouterr().out
    assert "60 iterations, steps 0 to 59, median 1 s" in output
    assert "2.00×" in output
    assert "the link between ranks 1 and 2 is 3.0× slower" in output
    assert "swapped places of ranks 2 ↔ 3; iteration 2.00 s → 1.00 s" in output


def test_the_picture_holds_the_changes(log_path, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "run.svg"
    assert main(["stragglers", str(log_path), "--plot", str(picture)]) == 0
    text = picture.read_text()
    assert text.lstrip().startswith("<?xml")
    assert "slowdown of pipeline 1, 2.00×" in text
    assert "found: the link between ranks 1 and 2 is 3.0× slower" in text
    assert "S3 applied: swapped places of ranks 2 ↔ 3" in text


def test_words_of_a_picture_never_overlap_and_stay_inside(monkeypatch, tmp_path):
    figure_module = pytest.importorskip("matplotlib.figure")
    drawn = []

    class Figure(figure_module.Figure):
        def savefig(self, *_, **__):
            self.draw_without_rendering()
            drawn.append(self)

    monkeypatch.setattr(figure_module, "Figure", Figure)
    steps = (0, 3, 10, 400, 402, 404, 900, 990, 995, 998, 999)
    findings = [FindingEvent(step=s, kind=FindingKind.DEVICE, ranks=(s,), ratio=2) for s in steps]
    plot_events([IterationEvent(step=999, iteration_s=1.0), *findings], tmp_path / "x.png")
    (figure,) = drawn
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == len(steps)
    for box in boxes:
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert sum(box.overlaps(other) for other in boxes) == 1  # itself


def test_a_reader_that_has_seen_enough_is_no_error(log_path):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "lightning_hetero.cli", "stragglers", log_path]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=True)
    os.close(writing)
    assert done.stderr == b""


def test_what_cannot_be_read_or_drawn_is_one_line_and_exit_code_2(log_path, tmp_path, capsys):
    assert main(["stragglers", str(tmp_path / "none.jsonl")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    pytest.importorskip("matplotlib")
    assert main(["stragglers", str(log_path), "--plot", str(tmp_path / "run.xyz")]) == 2
    assert "run.xyz" in capsys.readouterr().err


def test_a_folder_stands_for_the_recordings_in_it(tmp_path, capsys):
    folder = tmp_path / "stragglers"
    folder.mkdir()
    assert main(["stragglers", str(folder)]) == 2
    assert "holds no .jsonl file" in capsys.readouterr().err
    for rank in range(2):
        (folder / f"rank{rank}.jsonl").write_text("")
    assert main(["stragglers", str(folder)]) == 0
    assert "rank1.jsonl holds no events" in capsys.readouterr().out


def test_an_empty_log_says_so(tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    assert main(["stragglers", str(tmp_path / "empty.jsonl")]) == 0
    assert "no events" in capsys.readouterr().out


def test_a_run_in_which_nothing_happened_is_drawn_without_a_warning(tmp_path):
    events = [IterationEvent(step=step, iteration_s=1.0) for step in (1, 2)]
    plot_events(events, tmp_path / "quiet.png")
    assert (tmp_path / "quiet.png").stat().st_size > 0
