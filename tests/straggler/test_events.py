"""Laws of the event log: what is written is read back, bad lines are named, one message."""

import pytest

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.straggler import (
    ActionEvent,
    BocdDetector,
    ChangeEvent,
    ChangeKind,
    Decision,
    DecisionKind,
    EventLog,
    Finding,
    FindingEvent,
    FindingKind,
    IterationEvent,
    Mitigation,
    format_message,
    read_events,
)

CHANGE = ChangeEvent(
    step=412,
    onset_step=405,
    kind=ChangeKind.SLOWDOWN,
    ratio=1.8,
    before=1.0,
    after=1.8,
    confidence=0.99,
    where="pipeline 1",
)
FINDING = Finding(kind=FindingKind.DEVICE, ranks=(3,), ratio=1.9)
DECISION = Decision(kind=DecisionKind.APPLY, mitigation=Mitigation.REBALANCE, reason="3.00 s lost")
ACTION = ActionEvent.from_decision(
    DECISION,
    step=412,
    effect="moved 5 of 32 micro-batches away",
    before_s=1.8,
    after_s=1.14,
    cost_s=0.2,
)
EVENTS = (
    IterationEvent(step=411, iteration_s=1.79, predicted_s=1.0),
    IterationEvent(step=412, iteration_s=float("inf")),
    CHANGE,
    FindingEvent.from_finding(FINDING, step=412),
    ACTION,
)


def test_events_survive_the_file(tmp_path):
    path = tmp_path / "run" / "events.jsonl"
    log = EventLog(path)
    for event in EVENTS[:2]:
        log.write(event)
    log = EventLog(path)
    for event in EVENTS[2:]:
        log.write(event)
    assert read_events(path) == EVENTS
    assert read_events(path)[3].finding == FINDING


def test_a_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.write(EVENTS[0])
    with path.open("a") as file:
        file.write('{"event": "iterat')
    assert read_events(path) == EVENTS[:1]


def test_a_line_that_a_crash_has_torn_is_left_out_and_said_also_after_a_restart(tmp_path, caplog):
    path = tmp_path / "events.jsonl"
    for event in EVENTS[:2]:
        EventLog(path).write(event)
        with path.open("a") as file:
            file.write('{"event": "iterat')
    EventLog(path).write(EVENTS[2])
    assert read_events(path) == EVENTS[:3]
    assert [f"line {number} is torn" in caplog.text for number in (1, 2, 4, 5)] == [
        False, True, True, False,
    ]  # fmt: skip


def test_a_relative_log_stays_where_the_run_began(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = EventLog("run/events.jsonl")
    monkeypatch.chdir("/")
    log.write(EVENTS[0])
    assert read_events(tmp_path / "run/events.jsonl") == EVENTS[:1]


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        '{"event": "party", "step": 1}',
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
    assert format_message(CHANGE, [FINDING], ACTION) == (
        "step 412: pipeline 1 slowed 1.8× (since step 405): rank 3 computes 1.9× slower than its "
        "peers; S2 moved 5 of 32 micro-batches away, iteration 1.80 s → 1.14 s"
    )


def test_a_change_point_becomes_an_event_with_the_steps_of_the_run():
    detector = BocdDetector()
    found = [detector.update(1.0 if i < 50 else 2.0) for i in range(60)]
    change = next(c for c in found if c is not None)
    event = ChangeEvent.from_change(change, step=1000 + change.step, onset_step=1050)
    assert (event.step, event.onset_step, event.kind) == (1053, 1050, ChangeKind.SLOWDOWN)
    assert format_message(event) == "step 1053: the run slowed 2.0× (since step 1050)"
