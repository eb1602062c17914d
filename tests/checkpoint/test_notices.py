"""Each provider's metadata server as a fake on loopback; nothing ever waits for it."""

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
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

NEEDED = {
    "/latest/meta-data/spot/instance-action": ("X-aws-ec2-metadata-token", "secret"),
    "/computeMetadata/v1/instance/preempted": ("Metadata-Flavor", "Google"),
    "/metadata/scheduledevents": ("Metadata", "true"),
}
"""The header without which a server doesn't answer, by path."""


class FakeMetadata:
    """A metadata server whose answer, status and body, a test sets."""

    def __init__(self) -> None:
        self.answer = 404, ""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path, _, query = self.path.partition("?")
                assert query.startswith("api-version=") == (path == "/metadata/scheduledevents")
                name, value = NEEDED[path]
                self._reply(*(fake.answer if self.headers[name] == value else (401, "")))

            def do_PUT(self) -> None:
                assert self.path == "/latest/api/token"
                assert int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) > 0
                self._reply(200, "secret")

            def _reply(self, status: int, body: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

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


TIME = datetime(2026, 5, 4, 8, 22, tzinfo=UTC)
PREEMPT = {
    "EventType": "Preempt",
    "Resources": ["vm-1"],
    "NotBefore": "Mon, 04 May 2026 08:22:00 GMT",
}


def events(*items: dict[str, object]) -> str:
    return json.dumps({"DocumentIncarnation": 1, "Events": items})


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        (AwsSpotNotice, None, None),
        (
            AwsSpotNotice,
            '{"action": "terminate", "time": "2026-05-04T08:22:00Z"}',
            Notice(reason="EC2 spot terminate", at=TIME),
        ),
        # What is there but can't be read still counts.
        (AwsSpotNotice, "hibernate soon", Notice(reason="EC2 spot: hibernate soon")),
        (GcpPreemptionNotice, "FALSE", None),
        (GcpPreemptionNotice, "TRUE\n", Notice(reason="GCE preemption")),
        (AzureScheduledEvents, events(), None),
        (AzureScheduledEvents, events({**PREEMPT, "Resources": ["vm-2"]}), None),
        (AzureScheduledEvents, events({**PREEMPT, "EventType": "Freeze"}), None),
        (
            AzureScheduledEvents,
            events({**PREEMPT, "EventType": "Freeze"}, PREEMPT),
            Notice(reason="Azure Preempt", at=TIME),
        ),
        (
            AzureScheduledEvents,
            events({**PREEMPT, "NotBefore": ""}),
            Notice(reason="Azure Preempt"),
        ),
    ],
)
def test_a_notice_is_what_the_server_says_of_this_machine(
    metadata: FakeMetadata, kind: Any, body: str | None, expected: Notice | None
) -> None:
    options = {"machine": "vm-1"} if kind is AzureScheduledEvents else {}
    metadata.answer = (404, "not found") if body is None else (200, body)
    assert kind(base_url=metadata.url, **options).pending() == expected


@pytest.mark.parametrize("kind", [AwsSpotNotice, GcpPreemptionNotice, AzureScheduledEvents])
def test_an_answer_from_something_else_or_nobody_is_an_error_and_no_notice(
    metadata: FakeMetadata, kind: type[AwsSpotNotice]
) -> None:
    for status in (302, 500):
        metadata.answer = status, "oops"
        with pytest.raises(OSError, match=str(status)):
            kind(base_url=metadata.url).pending()
    with pytest.raises(OSError, match=r"refused|timed out"):
        kind(base_url="http://127.0.0.1:9", timeout_s=0.2).pending()


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
    waits = NoticeWatcher([Scripted(None)], interval_s=60.0)
    waits.start()
    assert waits.pending() is None
    waits.stop()
    assert not waits._thread.is_alive()
