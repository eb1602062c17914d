import json
import pathlib
import subprocess
import sys
import time

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


def finish(*processes: subprocess.Popen[str], timeout_s: float = 150) -> list[str]:
    deadline = time.monotonic() + timeout_s
    try:
        return [p.communicate(timeout=deadline - time.monotonic())[0] for p in processes]
    finally:
        for process in processes:
            process.kill()


def torchrun(*options: str) -> list[str]:
    return ["-m", "torch.distributed.run", *options, SCRIPT]


def losses_of(folder: pathlib.Path) -> list[list[float]]:
    return [json.loads(path.read_text())["losses"] for path in sorted(folder.glob("rank*.json"))]


@pytest.fixture(scope="module")
def popen_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("popen")
    process = start(SCRIPT, "--output", str(folder))
    (output,) = finish(process)
    assert process.returncode == 0, output
    losses = losses_of(folder)
    assert len(losses) == 3
    assert losses[0] == losses[1] == losses[2]
    assert len(losses[0]) == 3
    return losses[0]


def test_torchrun_gives_the_same_losses(tmp_path: pathlib.Path, popen_losses: list[float]) -> None:
    command = torchrun("--standalone", "--nproc-per-node=3")
    process = start(*command, "--output", str(tmp_path))
    (output,) = finish(process)
    assert process.returncode == 0, output
    assert losses_of(tmp_path) == [popen_losses] * 3


def test_nodes_may_have_different_numbers_of_processes(
    tmp_path: pathlib.Path, popen_losses: list[float]
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
    assert losses_of(tmp_path) == [popen_losses] * 3


def test_spawn_gives_the_same_losses_and_brings_the_weights_home(
    tmp_path: pathlib.Path, popen_losses: list[float]
) -> None:
    process = start(SCRIPT, "--output", str(tmp_path), "--start-method", "spawn")
    (output,) = finish(process)
    assert process.returncode == 0, output
    report = json.loads((tmp_path / "rank0.json").read_text())
    popen = start(SCRIPT, "--output", str(tmp_path))
    finish(popen)
    expected = json.loads((tmp_path / "rank0.json").read_text())
    assert report["sum"] == expected["sum"]


def test_a_failing_rank_ends_the_script_with_an_error(tmp_path: pathlib.Path) -> None:
    process = start(SCRIPT, "--output", str(tmp_path), "--fail-on", "2")
    (output,) = finish(process, timeout_s=90)
    assert process.returncode != 0
    assert "ValueError: fails on purpose" in output
    assert not losses_of(tmp_path)
