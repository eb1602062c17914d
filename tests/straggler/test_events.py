"""Laws of the event log: what is written is read back and shown, bad lines are named."""

import json
import os
import subprocess
import sys
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.cli import main
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.event_log import append_event
from lightning_hetero.straggler import (
    ActionEvent,
    ChangeEvent,
    ChangeKind,
    DecisionKind,
    Finding,
    FindingKind,
    IterationEvent,
    Mitigation,
    read_events,
)
from lightning_hetero.straggler.events import to_entry

ITERATIONS = tuple(IterationEvent(step=step, iteration_s=1.0) for step in range(60))
CHANGE = ChangeEvent(
    step=43, onset_step=40, kind=ChangeKind.SLOWDOWN, before=1.0, after=2.0, where="pipeline 1"
)
FOUND = Finding(step=43, kind=FindingKind.LINK, ranks=(1, 2), ratio=3.0)
ACTION = ActionEvent(
    step=45,
    kind=DecisionKind.APPLY,
    mitigation=Mitigation.SWAP,
    reason="5.00 s lost",
    effect="swapped places of ranks 2, 3",
    before_s=2.0,
    after_s=1.0,
)
EVENTS = (*ITERATIONS, CHANGE, FOUND, ACTION)


@pytest.fixture
def log(tmp_path):
    """Return the log of a run whose link is slow for a while, with other callbacks' lines."""
    path = tmp_path / "run" / "events.jsonl"
    append_event(path, "started", step=0, nodes=["here"])
    for event in EVENTS:
        append_event(path, **to_entry(event))
    return path


def test_events_are_read_back_and_shown(log, capsys):
    assert read_events(log) == EVENTS
    assert main(["stragglers", str(log)]) == 0
    output = capsys.readouterr().out
    assert "60 iterations, steps 0 to 59, median 1 s" in output
    for event in (CHANGE, FOUND, ACTION):
        assert str(event) in output


def test_a_reader_that_has_seen_enough_is_no_error(log):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "lightning_hetero.cli", "stragglers", log]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=True)
    os.close(writing)
    assert done.stderr == b""


def test_a_missing_log_is_an_error_and_an_empty_one_says_so(tmp_path, capsys):
    assert main(["stragglers", str(tmp_path / "none.jsonl")]) == 2
    error = capsys.readouterr().err
    assert "none.jsonl" in error
    assert error.count("\n") == 1
    (tmp_path / "empty.jsonl").write_text("")
    assert main(["stragglers", str(tmp_path / "empty.jsonl")]) == 0
    assert "no events" in capsys.readouterr().out


KINDS = (IterationEvent, ChangeEvent, Finding, ActionEvent)
KEYS = st.sampled_from(sorted({field.name for kind in KINDS for field in fields(kind)} | {"new"}))
STRANGE = st.one_of(
    st.sampled_from([None, True, "", "x", "inf", 10**400, 10**30, -1, [], {}, [None], ["a"], [[]]]),
    st.floats(),
    st.text(max_size=4),
)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([*map(to_entry, EVENTS[-4:]), {"event": "other"}, {}]),
    st.dictionaries(KEYS, STRANGE),
)
def test_any_line_is_an_event_or_refused_by_its_number(tmp_path_factory, entry, changes):
    path = tmp_path_factory.getbasetemp() / "any-line.jsonl"
    path.write_text(json.dumps({**entry, **changes}) + "\n[" + "[" * 50_000 + "\n")
    try:
        said = f"line 1 {'; '.join(map(str, read_events(path)))}"
    except ConfigurationError as error:
        said = str(error)
    assert "line 1" in said
    assert len(said) < 700
