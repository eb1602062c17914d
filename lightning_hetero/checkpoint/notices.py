"""Whether this machine is about to be taken away, as AWS, GCP, Azure or a signal says.

A notice only says so. What to do about it (agree at a step boundary, snapshot, leave) is decided
elsewhere. `NoticeWatcher` asks from a thread, so that no training step waits for a metadata server.
"""

import json
import logging
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import FrameType
from typing import Any, Protocol

__all__ = [
    "AwsSpotNotice",
    "AzureScheduledEvents",
    "GcpPreemptionNotice",
    "Notice",
    "NoticeWatcher",
    "PreemptionNotice",
    "SigtermNotice",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Notice:
    """This machine will go."""

    reason: str
    """The provider's words."""
    at: datetime | None = None
    """When, as far as it is known; with a time zone."""


class PreemptionNotice(Protocol):
    """Something that knows whether this machine will be taken away."""

    def pending(self) -> Notice | None:
        """Return the notice, or None; OSError if nobody answers."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Refuse: a metadata server never redirects, so the answer isn't from one."""


@dataclass(kw_only=True, eq=False)
class _MetadataServer:
    """HTTP on a link-local metadata server, past any proxy."""

    base_url: str
    """The server."""
    timeout_s: float = 1.0
    """Seconds to wait for its answer."""

    def _request(self, path: str, headers: Mapping[str, str], *, method: str = "GET") -> str | None:
        """Return the body; None if there is nothing at that path (404); OSError otherwise."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
        request = urllib.request.Request(
            self.base_url.rstrip("/") + path, headers=dict(headers), method=method
        )
        try:
            with opener.open(request, timeout=self.timeout_s) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return None
            raise OSError(f"{request.full_url} answered {error.code}") from error


@dataclass(kw_only=True, eq=False)
class AwsSpotNotice(_MetadataServer):
    """EC2 spot: /latest/meta-data/spot/instance-action, two minutes ahead (IMDSv2)."""

    base_url: str = "http://169.254.169.254"
    _token: str = field(default="", init=False, repr=False)
    _token_until_s: float = field(default=0.0, init=False, repr=False)

    def pending(self) -> Notice | None:
        """Return the interruption if one is scheduled."""
        body = self._request(
            "/latest/meta-data/spot/instance-action",
            {"X-aws-ec2-metadata-token": self._fresh_token()},
        )
        if body is None:
            return None
        try:
            action = json.loads(body)
            return Notice(
                reason=f"EC2 spot {action['action']}", at=datetime.fromisoformat(action["time"])
            )
        except (ValueError, KeyError, TypeError):
            # The path exists only when the instance will go, so a body that can't be read counts.
            return Notice(reason=f"EC2 spot: {body}")

    def _fresh_token(self) -> str:
        lifetime_s = 21600
        if time.monotonic() >= self._token_until_s:
            token = self._request(
                "/latest/api/token",
                {"X-aws-ec2-metadata-token-ttl-seconds": str(lifetime_s)},
                method="PUT",
            )
            if token is None:
                raise OSError("The EC2 metadata server gave no token.")
            self._token = token
            self._token_until_s = time.monotonic() + lifetime_s / 2
        return self._token


@dataclass(kw_only=True, eq=False)
class GcpPreemptionNotice(_MetadataServer):
    """GCE: /computeMetadata/v1/instance/preempted turns TRUE, thirty seconds ahead."""

    base_url: str = "http://metadata.google.internal"

    def pending(self) -> Notice | None:
        """Return the preemption if it has been announced."""
        body = self._request(
            "/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}
        )
        if body is not None and body.strip().upper() == "TRUE":
            return Notice(reason="GCE preemption")
        return None


@dataclass(kw_only=True, eq=False)
class AzureScheduledEvents(_MetadataServer):
    """Azure: Preempt and Terminate events of this machine, half a minute ahead.

    Its first answer may take two minutes.
    """

    base_url: str = "http://169.254.169.254"
    machine: str | None = None
    """Name of this virtual machine; None takes events of any in the placement group."""
    event_types: Sequence[str] = ("Preempt", "Terminate")
    """Kinds of events that count."""

    def pending(self) -> Notice | None:
        """Return the first event that takes this machine away."""
        body = self._request(
            "/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"}
        )
        try:
            events = json.loads(body or "{}").get("Events", [])
        except (ValueError, AttributeError) as error:
            raise OSError(f"Azure's scheduled events can't be read: {body!r}") from error
        for event in events:
            concerned = self.machine is None or self.machine in event.get("Resources", ())
            if concerned and event.get("EventType") in self.event_types:
                return Notice(
                    reason=f"Azure {event['EventType']}", at=_parse_http(event.get("NotBefore"))
                )
        return None


class SigtermNotice:
    """SIGTERM to this process; make it in the main thread and undo it with `restore`.

    Args:
        pass_on: Whether the handler that was there before hears of the signal, too.
        is_received: Whether the signal has come already.
    """

    def __init__(self, *, pass_on: bool = True, is_received: bool = False) -> None:
        self._is_received = is_received
        self._pass_on = pass_on
        self._previous = signal.signal(signal.SIGTERM, self._handle)

    def pending(self) -> Notice | None:
        """Return a notice once the signal has come."""
        return Notice(reason="SIGTERM") if self._is_received else None

    def restore(self) -> None:
        """Put the earlier handler back."""
        signal.signal(signal.SIGTERM, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # No Event: a signal in the middle of its `set` would wait for the lock that it interrupted.
        self._is_received = True
        if self._pass_on and callable(self._previous):
            self._previous(number, frame)


class NoticeWatcher:
    """Asks from a daemon thread and keeps the first notice.

        watcher = NoticeWatcher([AwsSpotNotice(), SigtermNotice()])
        watcher.start()
        watcher.pending()  # None, until this machine is about to go

    Args:
        notices: Whom to ask.
        interval_s: Seconds between rounds.
    """

    def __init__(self, notices: Sequence[PreemptionNotice], *, interval_s: float = 2.0) -> None:
        self._notices = tuple(notices)
        self._interval_s = interval_s
        self._found: Notice | None = None
        self._ended = threading.Event()
        self._silent: set[int] = set()
        self._thread = threading.Thread(target=self._watch, name="preemption-notice", daemon=True)

    def start(self) -> None:
        """Start asking."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def pending(self) -> Notice | None:
        """Return the first notice found so far; never waits for a server."""
        return self._found

    def _watch(self) -> None:
        while not self._ended.is_set() and self._found is None:
            for index, notice in enumerate(self._notices):
                found = self._ask(index, notice)
                if found is not None:
                    self._found = found
                    _log.warning("This machine will go: %s, at %s", found.reason, found.at)
                    return
            self._ended.wait(self._interval_s)

    def _ask(self, index: int, notice: PreemptionNotice) -> Notice | None:
        try:
            return notice.pending()
        except Exception as error:
            # Whatever a broken server or somebody's own notice raises: the next answer may be good.
            # Once is enough: off the cloud this would fill the log.
            if index not in self._silent:
                _log.warning("%s doesn't answer: %r", type(notice).__name__, error)
                self._silent.add(index)
            return None


def _parse_http(text: Any) -> datetime | None:
    """Parse "Mon, 19 Sep 2016 18:29:47 GMT"; None if the event has begun or the text is odd."""
    try:
        return parsedate_to_datetime(text).astimezone(UTC)
    except (TypeError, ValueError):
        return None
