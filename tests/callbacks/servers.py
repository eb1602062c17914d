"""Servers on loopback."""

import http.client
import subprocess
import sys
import time
from typing import Any, Self

from tests.processes import free_port


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

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

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
