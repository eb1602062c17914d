"""Servers on loopback: spot notices, S3, and a proxy before it that fails on demand."""

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from enum import Enum, auto
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from tests.processes import free_port


class _Server:
    """An HTTP server on a thread; a context that ends it."""

    def __init__(self) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()

            def answer(self) -> None:
                outer.answer(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        raise NotImplementedError


def _reply(request: BaseHTTPRequestHandler, status: int, body: bytes = b"") -> None:
    request.send_response(status)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)


class MetadataServer(_Server):
    """EC2's, for several nodes: their names come first in the path."""

    def __init__(self) -> None:
        super().__init__()
        self._going: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def take_away(self, node: str) -> None:
        self._going.add(node)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        node, _, path = request.path.lstrip("/").partition("/")
        if path == "latest/api/token":
            _reply(request, 200, b"token")
        elif node in self._going:
            action = {"action": "terminate", "time": "2030-01-01T00:00:00Z"}
            _reply(request, 200, json.dumps(action).encode())
        else:
            _reply(request, 404)


class Mode(Enum):
    """How a proxy behaves."""

    GOOD = auto()
    ERROR = auto()
    """Answers 500."""
    DOWN = auto()
    """Hangs up."""
    SLOW = auto()
    """Takes a fifth of a second longer for each request."""


class UnreliableProxy(_Server):
    """Passes requests on to another port, as its mode says."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port
        self.mode = Mode.GOOD
        self.num_requests: Counter[Mode] = Counter()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = self._read(request)
        self.num_requests[self.mode] += 1
        match self.mode:
            case Mode.ERROR:
                return _reply(request, 500)
            case Mode.DOWN:
                request.close_connection = True
                return request.connection.shutdown(socket.SHUT_RDWR)
            case Mode.SLOW:
                time.sleep(0.2)
        upstream = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        headers = {k: v for k, v in request.headers.items() if k.lower() != "transfer-encoding"}
        upstream.request(request.command, request.path, body, headers)
        response = upstream.getresponse()
        data = response.read()
        request.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in {"content-length", "transfer-encoding", "connection"}:
                request.send_header(name, value)
        length = response.getheader("Content-Length") if request.command == "HEAD" else len(data)
        request.send_header("Content-Length", str(length or 0))
        request.end_headers()
        request.wfile.write(data)
        upstream.close()
        return None

    @staticmethod
    def _read(request: BaseHTTPRequestHandler) -> bytes:
        # Python's server has answered "Expect: 100-continue" already.
        return request.rfile.read(int(request.headers.get("Content-Length") or 0))


class S3Server:
    """A real S3 server as a process, with one bucket."""

    def __enter__(self) -> Self:
        self.port = free_port()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            try:
                connection.request("PUT", "/bucket", headers={"Host": "s3.amazonaws.com"})
                assert connection.getresponse().status == 200
                return self
            except ConnectionError:
                assert self._process.poll() is None, "the S3 server has ended"
                time.sleep(0.1)
            finally:
                connection.close()

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    @staticmethod
    def options(port: int) -> dict[str, Any]:
        """Return fsspec's options to reach it through a port."""
        return {
            "key": "test",
            "secret": "test",
            "endpoint_url": f"http://127.0.0.1:{port}",
            "client_kwargs": {"region_name": "eu-west-1"},
            "config_kwargs": {"retries": {"max_attempts": 1}},
        }
