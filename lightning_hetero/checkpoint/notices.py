"""Find out from AWS, GCP, Azure or a signal whether this machine is about to be taken away.

What to do about a notice (agree at a step boundary, save, leave) is decided in `callbacks.elastic`.
`NoticeWatcher` polls the providers' metadata servers from a thread, so that no training step waits
for them.
"""

import json
import logging
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException
from types import FrameType
from typing import Protocol
from urllib.parse import urlsplit

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Notice:
    """The announcement that this machine will be taken away."""

    reason: str
    """What the provider's server said."""
    at: datetime | None = None
    """When it will go, with a time zone; None if the provider doesn't say."""


class PreemptionNotice(Protocol):
    """A source that knows whether this machine will be taken away.

    Write your own for a provider that isn't here: any object with this method. ::

        class FileNotice:
            def pending(self) -> Notice | None:
                return Notice(reason="asked to go") if Path("/run/leave").exists() else None
    """

    def pending(self) -> Notice | None:
        """Return the notice, or None; OSError if nobody answers."""


@dataclass(kw_only=True)
class _MetadataServer:
    """HTTP on a link-local metadata server, past any proxy."""

    base_url: str
    """The server."""
    timeout_s: float = 1.0
    """Seconds to wait for its answer."""

    def _request(self, path: str, headers: Mapping[str, str], *, method: str = "GET") -> str | None:
        """Return the body; None if there is nothing at that path (404); OSError otherwise."""
        place = urlsplit(self.base_url)
        connection = HTTPConnection(str(place.hostname), place.port, timeout=self.timeout_s)
        try:
            connection.request(method, place.path.rstrip("/") + path, headers=dict(headers))
            answer = connection.getresponse()
            body = answer.read().decode()
        except HTTPException as error:
            raise OSError(f"{self.base_url}{path}: {error!r}") from error
        finally:
            connection.close()
        if answer.status not in (200, 404):
            raise OSError(f"{self.base_url}{path} answered {answer.status}")
        return body if answer.status == 200 else None


@dataclass(kw_only=True)
class AwsSpotNotice(_MetadataServer):
    """Notice that AWS will interrupt this EC2 spot instance, two minutes ahead.

    It polls `/latest/meta-data/spot/instance-action` of the instance's metadata (IMDSv2). ::

        Trainer(callbacks=[LayerwiseCheckpoint("s3://bucket/run"), ElasticRestart(AwsSpotNotice())])
    """

    base_url: str = "http://169.254.169.254"

    def pending(self) -> Notice | None:
        """Return the interruption if one is scheduled."""
        lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        token = self._request("/latest/api/token", lifetime, method="PUT")
        own = {"X-aws-ec2-metadata-token": token or ""}
        body = self._request("/latest/meta-data/spot/instance-action", own)
        if body is None:
            return None
        try:
            action = json.loads(body)
            at = datetime.fromisoformat(action["time"])
            return Notice(reason=f"EC2 spot {action['action']}", at=at)
        except (ValueError, KeyError, TypeError):
            # The path exists only when the instance will go, so a body that can't be read counts.
            return Notice(reason=f"EC2 spot: {body}")


@dataclass(kw_only=True)
class GcpPreemptionNotice(_MetadataServer):
    """Notice that Google will preempt this Compute Engine instance, thirty seconds ahead.

    It polls `/computeMetadata/v1/instance/preempted`, which is then "TRUE". ::

        Trainer(callbacks=[saving, ElasticRestart(GcpPreemptionNotice())])
    """

    base_url: str = "http://metadata.google.internal"

    def pending(self) -> Notice | None:
        """Return the preemption if it has been announced."""
        path = "/computeMetadata/v1/instance/preempted"
        body = self._request(path, {"Metadata-Flavor": "Google"}) or ""
        return Notice(reason="GCE preemption") if body.strip() == "TRUE" else None


@dataclass(kw_only=True)
class AzureScheduledEvents(_MetadataServer):
    """Notice that Azure will evict or delete this virtual machine, half a minute ahead.

    It polls `/metadata/scheduledevents` for Preempt and Terminate events. Azure turns these events
    on at the first request, whose answer may take two minutes. ::

        Trainer(callbacks=[saving, ElasticRestart(AzureScheduledEvents(machine="node-3"))])
    """

    base_url: str = "http://169.254.169.254"
    machine: str | None = None
    """Name of this virtual machine. None takes the events of all machines in the placement group,
    so give it if there are several."""

    def pending(self) -> Notice | None:
        """Return the first event that takes this machine away."""
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        events = json.loads(self._request(path, {"Metadata": "true"}) or "{}").get("Events", [])
        for event in events:
            is_own = self.machine is None or self.machine in event["Resources"]
            if is_own and event["EventType"] in ("Preempt", "Terminate"):
                # "Mon, 19 Sep 2016 18:29:47 GMT"; nothing once the event has begun.
                text = event["NotBefore"]
                at = parsedate_to_datetime(text).astimezone(UTC) if text else None
                return Notice(reason=f"Azure {event['EventType']}", at=at)
        return None


class SigtermNotice:
    """SIGTERM to this process; make it in the main thread and undo it with `restore`.

    Args:
        pass_on: Whether the earlier handler is called as well.
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
        # Not an Event: a second signal in the middle of its `set` would wait for ever for the lock
        # that `set` holds.
        self._is_received = True
        if self._pass_on and callable(self._previous):
            self._previous(number, frame)


class NoticeWatcher:
    """Polls notices from a daemon thread, and keeps the first one.

        watcher = NoticeWatcher([AwsSpotNotice(), SigtermNotice()])
        watcher.start()
        watcher.pending()  # None, until this machine is about to go

    Args:
        notices: The notices to poll.
        interval_s: Seconds between two polls.
    """

    def __init__(self, notices: Sequence[PreemptionNotice], *, interval_s: float = 2.0) -> None:
        self._notices = tuple(notices)
        self._interval_s = interval_s
        self._found: Notice | None = None
        self._ended = threading.Event()
        self._silent: set[int] = set()
        self._thread = threading.Thread(target=self._watch, name="preemption-notice", daemon=True)

    def start(self) -> None:
        """Start to poll."""
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
            # A broken server or a user's own notice may raise anything, and answer well next time.
            # It is logged once, since outside of the cloud no question is ever answered.
            if index not in self._silent:
                _log.warning("%s doesn't answer: %r", type(notice).__name__, error)
                self._silent.add(index)
            return None
