"""The limit of files of the process that serves a run's store."""

import os
import resource
import subprocess
import sys

import pytest

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.runtime.ranks.open_files import (
    allow_files,
    find_server,
)

NUM_RANKS = 1024
LIMIT = 1024


@pytest.mark.parametrize(
    ("soft", "hard", "raised_to"),
    [(1024, 4096, 2304), (4096, 4096, None), (resource.RLIM_INFINITY, 4096, None)],
)
def test_the_rank_that_serves_the_store_may_open_as_many_files_as_it_needs(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised_to: int | None
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))
    allow_files(NUM_RANKS)
    assert given == ([] if raised_to is None else [(raised_to, hard)])


def test_a_limit_that_is_too_low_for_the_store_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    with pytest.raises(ConfigurationError, match=r"needs 2304 open files .* allows 1024"):
        allow_files(NUM_RANKS)


def test_the_limit_of_another_process_that_serves_the_store_is_raised() -> None:
    served = "import socket; s = socket.create_server(('127.0.0.1', 0)); "
    told = "print(s.getsockname()[1], flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", served + told],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        _, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (LIMIT, hard))
        assert find_server(port, [os.getpid(), server.pid]) == server.pid
        assert find_server(port, [os.getpid()]) is None
        allow_files(NUM_RANKS, are_members=True, process_id=server.pid)
        assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE)[0] == 6400
        server.communicate(b"\n")


def test_a_rank_lets_the_process_that_started_it_serve_the_store() -> None:
    port = "import socket; s = socket.create_server(('127.0.0.1', 0)); port = s.getsockname()[1]; "
    limit = f"import resource; resource.setrlimit(7, ({LIMIT}, resource.getrlimit(7)[1])); "
    child = (
        "from lightning_hetero.runtime.ranks.open_files import allow_clients_of_ancestor; "
        f"import sys; allow_clients_of_ancestor(int(sys.argv[1]), {NUM_RANKS})"
    )
    start = (
        "import subprocess, sys; "
        f"subprocess.run([sys.executable, '-c', {child!r}, str(port)], check=True); "
        "print(resource.getrlimit(7)[0])"
    )
    told = subprocess.run(
        [sys.executable, "-c", port + limit + start], check=True, capture_output=True
    )
    assert int(told.stdout) == 6400
