"""The limit of files of the process that serves a run's store."""

import os
import resource
import subprocess
import sys

import pytest

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.runtime.ranks.meeting import allow_files

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


def test_a_rank_lets_the_process_that_started_it_serve_the_store() -> None:
    limit = f"import resource; resource.setrlimit(7, ({LIMIT}, resource.getrlimit(7)[1])); "
    child = (
        "from lightning_hetero.runtime.ranks.meeting import allow_clients_of_agent; "
        f"allow_clients_of_agent({NUM_RANKS})"
    )
    start = (
        "import subprocess, sys; "
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True); "
        "print(resource.getrlimit(7)[0])"
    )
    told = subprocess.run(
        [sys.executable, "-c", limit + start],
        check=True,
        capture_output=True,
        env=os.environ | {"TORCHELASTIC_USE_AGENT_STORE": "True"},
    )
    assert int(told.stdout) == 6400
