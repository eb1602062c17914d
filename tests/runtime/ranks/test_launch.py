import json
import pathlib
import sys
from typing import Any

import pytest

from tests.processes import free_port
from tests.scripts import run_python, start_python, wait_for_end

pytestmark = [pytest.mark.dist, pytest.mark.slow]

ROOT = pathlib.Path(__file__).parents[3]
SCRIPT = str(ROOT / "tests/runtime/ranks/launched.py")


def launch(*arguments: str, folder: pathlib.Path, executable: str | None = None) -> tuple[int, str]:
    command = [*arguments, "--output", folder]
    return run_python(command, folder=folder, executable=executable, PYTHONPATH=str(ROOT))


def reports_of(folder: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


@pytest.fixture(scope="module")
def popen_report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("popen")
    # Real interpreters, in each of which sets have another order.
    code, output = launch(SCRIPT, folder=folder, executable=sys.executable)
    assert code == 0, output
    reports = reports_of(folder)
    assert len(reports) == 3
    assert reports[0] == reports[1] == reports[2]
    assert len(reports[0]["losses"]) == 3
    return reports[0]


@pytest.mark.slow
def test_torchrun_on_nodes_with_different_numbers_of_processes_gives_the_same(
    tmp_path: pathlib.Path, popen_report: dict[str, Any]
) -> None:
    port, output = free_port(), tmp_path / "output"
    agents = [
        start_python(
            [
                "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}",
                f"--nproc-per-node={count}", "--master-addr=127.0.0.1", f"--master-port={port}",
                SCRIPT, "--output", tmp_path, "--devices", str(count),
            ],
            output=output,
            folder=tmp_path,
            PYTHONPATH=str(ROOT),
        )
        for node, count in enumerate((1, 2))
    ]  # fmt: skip
    assert wait_for_end(agents, output) == [0, 0], output.read_text()
    assert reports_of(tmp_path) == [popen_report] * 3


def test_spawn_gives_the_same_and_brings_the_weights_home(
    tmp_path: pathlib.Path, popen_report: dict[str, Any]
) -> None:
    code, output = launch(SCRIPT, "--start-method", "spawn", folder=tmp_path)
    assert code == 0, output
    # The losses stay with the module in the processes that trained it.
    assert [report["sum"] for report in reports_of(tmp_path)] == [popen_report["sum"]]
