"""Laws of the event log: what is written is read back, bad lines are named, one message."""

import json
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.cli.stragglers import summarise
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.event_log import append_event
from lightning_hetero.straggler import (
    ActionEvent,
    BocdDetector,
    ChangeEvent,
    ChangeKind,
    Finding,
    IterationEvent,
    read_events,
)
from lightning_hetero.straggler.events import format_message, to_entry
from tests.straggler.sample_events import ACTION, CHANGE, EVENTS, FOUND, ITERATIONS


def test_events_survive_the_file_and_a_restart(tmp_path):
    path = tmp_path / "run" / "events.jsonl"
    for event in EVENTS:
        append_event(path, **to_entry(event))
    assert read_events(path) == EVENTS


def test_a_log_of_the_run_is_read_for_what_it_says_of_stragglers(tmp_path):
    path = tmp_path / "events.jsonl"
    append_event(path, "started", step=0, nodes=["here"])
    append_event(path, **to_entry(CHANGE))
    append_event(path, "action", step=45, kind="keep", mitigation="S1", reason="no", after_s=None)
    assert [type(event) for event in read_events(path)] == [ChangeEvent, ActionEvent]


def test_logs_without_times_as_older_releases_wrote_them_are_read(tmp_path):
    path = tmp_path / "stragglers.jsonl"
    path.write_text(
        '{"event": "iteration", "step": 0, "iteration_s": 1.0}\n'
        '{"event": "finding", "step": 43, "kind": "link", "ranks": [1, 2], "ratio": 3.0}\n'
    )
    assert read_events(path) == (ITERATIONS[0], FOUND)


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        '{"event": "iteration", "step": 1.5, "iteration_s": 1}',
        '{"event": "iteration", "step": 1}',
        '{"event": "iteration", "step": 1, "iteration_s": "long"}',
        '{"event": "iteration", "step": 1, "iteration_s": 1, "colour": 3}',
        '{"event": "finding", "step": 1, "kind": "moon", "ranks": [1], "ratio": 2}',
    ],
)
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "iteration", "step": 1, "iteration_s": 1}\n' + line + "\n")
    with pytest.raises(ConfigurationError, match="line 2"):
        read_events(path)


def test_a_missing_log_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"none\.jsonl"):
        read_events(tmp_path / "none.jsonl")


def test_the_message_says_what_where_why_and_what_was_done():
    assert format_message(CHANGE, [FOUND], ACTION) == (
        "step 43: pipeline 1 slowed 2.0× (since step 40): the link between ranks 1 and 2 is 3.0× "
        "slower than its peers; S3 swapped places of ranks 2 ↔ 3, iteration 2.00 s → 1.00 s"
    )


def test_a_change_point_becomes_an_event_with_the_steps_of_the_run():
    detector = BocdDetector()
    found = [detector.update(1.0 if i < 50 else 2.0) for i in range(60)]
    change = next(c for c in found if c is not None)
    event = ChangeEvent(**{**vars(change), "step": 1000 + change.step, "onset_step": 1050})
    assert (event.step, event.onset_step, event.kind) == (1053, 1050, ChangeKind.SLOWDOWN)
    assert format_message(event) == "step 1053: the run slowed 2.0× (since step 1050)"


KINDS = (IterationEvent, ChangeEvent, Finding, ActionEvent)
STRANGE = st.one_of(
    st.sampled_from([None, True, "", "x", "inf", 10**400, 10**30, -1, [], {}, [None], ["a"], [[]]]),
    st.floats(),
    st.integers(),
    st.text(max_size=4),
)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_line_is_an_event_or_refused_by_its_number(tmp_path_factory, data):
    name = data.draw(st.sampled_from(["iteration", "change", "finding", "action", "other", None]))
    keys = st.sampled_from(sorted({field.name for kind in KINDS for field in fields(kind)}))
    known = {
        "iteration": {"step": 1, "iteration_s": 1.0},
        "change": {
            "step": 2,
            "onset_step": 1,
            "kind": "slowdown",
            "before": 1.0,
            "after": 2.0,
        },
        "finding": {"step": 2, "kind": "device", "ranks": [1], "ratio": 2.0},
    }.get(name, {})
    changes = data.draw(st.dictionaries(keys, STRANGE, max_size=2))
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    path.write_text(json.dumps({"event": name, **known, **changes}) + "\n[" + "[" * 50_000 + "\n")
    try:
        events = read_events(path)
    except ConfigurationError as error:
        said = str(error)
    else:
        said = f"line 1 {summarise(events) if events else ''}"
    assert "line 1" in said
    assert len(said) < 700
