"""Each provider's metadata server as a fake on loopback; nothing ever waits for it."""

import http.client
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from lightning_hetero.checkpoint import (
    AwsSpotNotice,
    AzureScheduledEvents,
    GcpPreemptionNotice,
    Notice,
    NoticeWatcher,
    SigtermNotice,
)

Answer = tuple[int, str]


class FakeMetadata:
    """A metadata server whose answers a test sets: (method, path, headers) to (status, body)."""

    def __init__(self) -> None:
        self.answer: Callable[[str, str, dict[str, str]], Answer] = lambda *_: (404, "")
        self.requests: list[tuple[str, str]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def _reply(self) -> None:
                fake.requests.append((self.command, self.path))
                status, body = fake.answer(self.command, self.path, dict(self.headers))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            do_GET = do_PUT = _reply

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMetadata]:
    # A proxy must never see these requests.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    fake = FakeMetadata()
    yield fake
    fake.close()


def aws(action: Answer) -> Callable[[str, str, dict[str, str]], Answer]:
    def answer(method: str, path: str, headers: dict[str, str]) -> Answer:
        lower = {key.lower(): value for key, value in headers.items()}
        if (method, path) == ("PUT", "/latest/api/token"):
            assert int(lower["x-aws-ec2-metadata-token-ttl-seconds"]) > 0
            return 200, "secret"
        if path == "/latest/meta-data/spot/instance-action":
            return action if lower.get("x-aws-ec2-metadata-token") == "secret" else (401, "")
        return 404, ""

    return answer


def test_aws_says_nothing_until_an_action_is_scheduled(metadata: FakeMetadata) -> None:
    notice = AwsSpotNotice(base_url=metadata.url)
    metadata.answer = aws((404, "not found"))
    assert notice.pending() is None
    metadata.answer = aws((200, '{"action": "terminate", "time": "2026-05-04T08:22:00Z"}'))
    found = notice.pending()
    assert found == Notice(reason="EC2 spot terminate", at=datetime(2026, 5, 4, 8, 22, tzinfo=UTC))


def test_an_aws_action_that_cannot_be_parsed_still_counts(metadata: FakeMetadata) -> None:
    metadata.answer = aws((200, "hibernate soon"))
    assert AwsSpotNotice(base_url=metadata.url).pending() == Notice(
        reason="EC2 spot: hibernate soon"
    )


@pytest.mark.parametrize(("body", "expected"), [("FALSE", False), ("TRUE", True), ("TRUE\n", True)])
def test_gcp_turns_true(metadata: FakeMetadata, body: str, *, expected: bool) -> None:
    def answer(method: str, path: str, headers: dict[str, str]) -> Answer:
        assert path == "/computeMetadata/v1/instance/preempted"
        lower = {key.lower(): value for key, value in headers.items()}
        return (200, body) if lower.get("metadata-flavor") == "Google" else (403, "")

    metadata.answer = answer
    found = GcpPreemptionNotice(base_url=metadata.url).pending()
    assert (found is not None) == expected


def events(*items: dict[str, object]) -> Callable[[str, str, dict[str, str]], Answer]:
    def answer(method: str, path: str, headers: dict[str, str]) -> Answer:
        assert path.startswith("/metadata/scheduledevents?api-version=")
        if headers.get("Metadata") != "true":
            return 400, ""
        return 200, json.dumps({"DocumentIncarnation": 1, "Events": items})

    return answer


def test_azure_counts_preemptions_of_this_machine_alone(metadata: FakeMetadata) -> None:
    notice = AzureScheduledEvents(base_url=metadata.url, machine="vm-1")
    preempt = {
        "EventType": "Preempt",
        "Resources": ["vm-1"],
        "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT",
    }
    for harmless in (
        (),
        ({**preempt, "Resources": ["vm-2"]},),
        ({**preempt, "EventType": "Freeze"},),
    ):
        metadata.answer = events(*harmless)
        assert notice.pending() is None
    metadata.answer = events({"EventType": "Freeze", "Resources": ["vm-1"]}, preempt)
    assert notice.pending() == Notice(
        reason="Azure Preempt", at=datetime(2016, 9, 19, 18, 29, 47, tzinfo=UTC)
    )
    metadata.answer = events({**preempt, "NotBefore": ""})
    assert notice.pending() == Notice(reason="Azure Preempt", at=None)


@pytest.mark.parametrize("kind", [AwsSpotNotice, GcpPreemptionNotice, AzureScheduledEvents])
@pytest.mark.parametrize("status", [302, 500])
def test_an_answer_from_something_else_is_an_error_and_no_notice(
    metadata: FakeMetadata, kind: type[AwsSpotNotice], status: int
) -> None:
    metadata.answer = lambda *_: (status, "oops")
    with pytest.raises(OSError, match=str(status)):
        kind(base_url=metadata.url).pending()


def test_nobody_at_the_address_is_an_error_within_the_timeout() -> None:
    with pytest.raises(OSError, match=r"refused|timed out"):
        GcpPreemptionNotice(base_url="http://127.0.0.1:9", timeout_s=0.2).pending()


def test_sigterm_is_a_notice_and_the_earlier_handler_still_runs() -> None:
    seen: list[int] = []
    original = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        notice = SigtermNotice()
        assert notice.pending() is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert notice.pending() == Notice(reason="SIGTERM")
        assert seen == [signal.SIGTERM]
        notice.restore()
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(seen) == 2
    finally:
        signal.signal(signal.SIGTERM, original)


class Scripted:
    """Gives prepared answers in turn, the last one for ever."""

    def __init__(self, *answers: Notice | Exception | None) -> None:
        self.answers = list(answers)

    def pending(self) -> Notice | None:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_the_watcher_outlives_any_error_says_so_once_and_keeps_the_notice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors = OSError("refused"), http.client.IncompleteRead(b""), UnicodeError(), KeyError("time")
    source = Scripted(*errors, None, OSError("refused"), Notice(reason="go"))
    watcher = NoticeWatcher([Scripted(None), source], interval_s=0.001)
    watcher.start()
    watcher._thread.join(60)
    assert watcher.pending() == Notice(reason="go")
    watcher.stop()
    assert sum("doesn't answer" in record.message for record in caplog.records) == 1


def test_a_signal_in_the_middle_of_its_own_handler_waits_for_nothing() -> None:
    notice = SigtermNotice(pass_on=False)
    notice.restore()

    def interrupt(*_: object) -> Callable[..., Any]:
        sys.settrace(None)
        notice._handle(signal.SIGTERM, None)
        sys.settrace(interrupt)
        return interrupt

    def handle() -> None:
        sys.settrace(interrupt)
        notice._handle(signal.SIGTERM, None)

    thread = threading.Thread(target=handle, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert notice.pending() == Notice(reason="SIGTERM")


def test_the_watcher_stops_when_told() -> None:
    watcher = NoticeWatcher([Scripted(None)], interval_s=60.0)
    watcher.start()
    assert watcher.pending() is None
    watcher.stop()
    assert not watcher._thread.is_alive()
