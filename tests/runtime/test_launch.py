import json
import pathlib
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.processes import clean_environment, free_port

pytestmark = [pytest.mark.dist, pytest.mark.slow]

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = str(ROOT / "tests/runtime/launched.py")


def start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        env=clean_environment(PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*processes: subprocess.Popen[str], timeout_s: float = 550) -> list[str]:
    deadline = time.monotonic() + timeout_s
    try:
        return [p.communicate(timeout=deadline - time.monotonic())[0] for p in processes]
    finally:
        for process in processes:
            process.kill()


def torchrun(*options: str) -> list[str]:
    return ["-m", "torch.distributed.run", *options, SCRIPT]


def reports_of(folder: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


@pytest.fixture(scope="module")
def popen_report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("popen")
    process = start(SCRIPT, "--output", str(folder))
    (output,) = finish(process)
    assert process.returncode == 0, output
    reports = reports_of(folder)
    assert len(reports) == 3
    assert reports[0] == reports[1] == reports[2]
    assert len(reports[0]["losses"]) == 3
    return reports[0]


def test_torchrun_on_nodes_with_different_numbers_of_processes_gives_the_same(
    tmp_path: pathlib.Path, popen_report: dict[str, Any]
) -> None:
    port = free_port()
    nodes = [
        start(
            *torchrun(
                "--nnodes=2", f"--node-rank={node}", f"--nproc-per-node={count}",
                "--master-addr=127.0.0.1", f"--master-port={port}",
            ),
            "--output", str(tmp_path), "--devices", str(count),
        )
        for node, count in enumerate((1, 2))
    ]  # fmt: skip
    outputs = finish(*nodes)
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert reports_of(tmp_path) == [popen_report] * 3


def test_spawn_gives_the_same_and_brings_the_weights_home(
    tmp_path: pathlib.Path, popen_report: dict[str, Any]
) -> None:
    process = start(SCRIPT, "--output", str(tmp_path), "--start-method", "spawn")
    (output,) = finish(process)
    assert process.returncode == 0, output
    # The losses stay with the module in the processes that trained it.
    assert [report["sum"] for report in reports_of(tmp_path)] == [popen_report["sum"]]


def test_a_failing_rank_ends_the_script_with_an_error(tmp_path: pathlib.Path) -> None:
    process = start(SCRIPT, "--output", str(tmp_path), "--fail-on", "2")
    (output,) = finish(process)
    assert process.returncode != 0
    assert "ValueError: fails on purpose" in output
    assert not reports_of(tmp_path)
