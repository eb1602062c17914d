"""Laws of a run's log: whoever dies while writing it costs a line, and nobody else's."""

import json
import time

from lightning_hetero.core.event_log import append_event, read_entries

TORN = '{"event": "iterat'


def names(path):
    return [entry["event"] for _, entry in read_entries(path)]


def test_a_line_says_what_happened_and_when(tmp_path):
    path = tmp_path / "run" / "log"
    before_s = time.time()
    append_event(path, "started", step=3, nodes=("here", "there"))
    ((number, entry),) = read_entries(path)
    assert number == 1
    assert before_s <= entry.pop("at_s") <= time.time()
    assert entry == {"event": "started", "step": 3, "nodes": ["here", "there"]}


def test_what_json_has_no_word_for_is_still_a_line_that_any_parser_reads(tmp_path):
    path = tmp_path / "log"
    append_event(path, "odd", values=(float("inf"), 1.5, None, True), by={2: float("nan")})

    def refuse(word):
        raise AssertionError(word)

    entry = json.loads(path.read_text(), parse_constant=refuse)
    assert (entry["values"], entry["by"]) == (["inf", 1.5, None, True], {"2": "nan"})


def test_a_line_that_is_being_written_is_left_for_later(tmp_path, caplog):
    path = tmp_path / "log"
    path.write_text('{"event": "ended"}\n' + TORN)
    assert list(read_entries(path)) == [(1, {"event": "ended"})]
    assert "torn" not in caplog.text


def test_a_line_that_a_crash_has_torn_costs_neither_the_rest_nor_what_comes_after(tmp_path, caplog):
    path = tmp_path / "log"
    for name in ("started", "failed"):
        append_event(path, name)
        with path.open("a") as file:
            file.write(TORN)
    append_event(path, "ended")
    assert names(path) == ["started", "failed", "ended"]
    assert [f"line {number} is torn" in caplog.text for number in range(1, 6)] == [
        False, True, False, True, False,
    ]  # fmt: skip


def test_a_disk_that_is_full_or_gone_costs_a_line_and_not_the_run(tmp_path, caplog):
    path, folder = tmp_path / "log", tmp_path / "file"
    path.symlink_to("/dev/full")
    folder.touch()
    append_event(path, "started")
    append_event(folder / "log", "started")
    path.unlink()
    append_event(path, "ended")
    assert names(path) == ["ended"]
    assert "No space left" in caplog.text
    assert "File exists" in caplog.text
