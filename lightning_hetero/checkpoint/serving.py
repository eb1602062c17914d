"""Read files of other ranks: each rank serves byte ranges by HTTP to ranks that know its token.

A server is started when it is first needed. It serves stores: the node's own tiers, and the slices
that this rank has in memory.
"""

import contextlib
import hmac
import secrets
import socket
import threading
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import quote, unquote

from lightning_hetero.core.process import is_loopback

Address = tuple[str, int, str]
"""Host, port and token of a server."""


class Readable(Protocol):
    """What files can be read from, such as a `Store`."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of a file."""


class FileServer:
    """Serves byte ranges of files to ranks that know the token.

    Args:
        host: Name or address of this machine by which other ranks reach it.
    """

    def __init__(self, host: str) -> None:
        self.stores: dict[str, Readable] = {}
        """What is served, by name."""
        self._host = host
        self._token = secrets.token_urlsafe(16)
        self._server: _Server | None = None
        self._lock = threading.Lock()

    @property
    def address(self) -> Address:
        """Host, port and token for readers; the server is started if it isn't running yet."""
        with self._lock:
            if self._server is None:
                self._server = _Server(self._token, self.read)
                thread = threading.Thread(
                    target=self._server.serve, name="checkpoint-serve", daemon=True
                )
                thread.start()
            return self._host, int(self._server.server_address[1]), self._token

    def read(self, store: str, name: str, start: int, stop: int | None) -> bytes:
        """Return what another rank has asked for."""
        return self.stores[store].read(name, start, stop)

    def close(self) -> None:
        """Serve nothing any more."""
        self.stores.clear()
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, token: str, read: Callable[[str, str, int, int | None], bytes]) -> None:
        self.token, self.read = token, read
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        # Requests may arrive on any of this machine's interfaces.
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        self.socket = socket.create_server(
            ("", 0), family=family, dualstack_ipv6=is_dual, backlog=128
        )
        self.server_address = self.socket.getsockname()

    def serve(self) -> None:
        """Answer requests, each on a thread of its own, until `stop` is called."""
        while True:
            try:
                request, client = self.get_request()
            except OSError:
                return
            self.process_request(request, client)

    def stop(self) -> None:
        """Take no more requests."""
        with contextlib.suppress(OSError):  # On Linux this ends `accept`, which waits for one.
            self.socket.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def handle_error(self, *_: Any) -> None:
        """Log nothing: the reader has closed the connection, and reports the reason itself."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        """Answer with the range that is asked for, or with the reason why not."""
        _, token, store, name = [*map(unquote, self.path.split("/", 3)), "", "", ""][:4]
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(403, b"unknown token")
            return
        start, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        try:
            stop = int(last) + 1 if last else None
            self._answer(206, self.server.read(store, name, int(start), stop))
        except Exception as error:
            # Stores raise their client library's own types.
            missing = isinstance(error, FileNotFoundError | KeyError)
            self._answer(404 if missing else 500, f"{type(error).__name__}: {error}".encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


class PeerFiles:
    """The files of one store that another rank serves.

    Args:
        address: The other rank's server.
        store: Which of its stores.
        timeout_s: How long to wait without receiving anything.
    """

    def __init__(self, address: Address, store: str, timeout_s: float) -> None:
        self._host, self._port, self._token = address
        self._store = store
        self._timeout_s = timeout_s

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of a file; OSError if they don't arrive."""
        if stop is not None and stop <= start:
            return b""
        last = "" if stop is None else stop - 1
        connection = HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            path = f"/{quote(self._token)}/{quote(self._store)}/{quote(name)}"
            connection.request("GET", path, headers={"Range": f"bytes={start}-{last}"})
            answer = connection.getresponse()
            data = answer.read()
        except HTTPException as error:
            raise OSError(f"{self}: {error!r}") from error
        except TimeoutError as error:
            raise TimeoutError(f"{self} made no progress for {self._timeout_s:g} s") from error
        finally:
            connection.close()
        if answer.status == 206:
            return data
        text = f"{self}: {data.decode(errors='replace')}"
        raise FileNotFoundError(text) if answer.status == 404 else OSError(text)

    def __str__(self) -> str:
        return f"{self._store} at {self._host}:{self._port}"


class Probe:
    """Finds out whether the process of a server has ended.

    A process that has ended refuses connections. But a firewall may refuse them, too: a refusal
    counts only on this machine, or if the server has accepted a connection before.

    Args:
        host: Name or address of this machine, as in its own server's address.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._reached: set[tuple[str, int]] = set()

    def has_ended(self, address: Address) -> bool:
        """Return whether a server is known to be gone; tries for at most a second."""
        place = address[0], address[1]
        try:
            socket.create_connection(place, timeout=1.0).close()
        except ConnectionRefusedError:
            return address[0] == self._host or place in self._reached
        except OSError:
            return False
        self._reached.add(place)
        return False


def own_host(meeting_host: str) -> str:
    """Return the address by which other ranks reach this machine; all reach `meeting_host`.

    That is the address from which packets to that host are sent. On that host itself it would be an
    address that only this machine knows, so there it is the host's name.
    """
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(meeting_host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])
            own = str(probe.getsockname()[0])
        return meeting_host if is_loopback(own) else own
    return meeting_host
