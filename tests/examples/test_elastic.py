"""Two real torchrun agents, of which one is killed and comes back, as a user starts them."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.fast_python import fast_python
from tests.processes import clean_environment

ROOT = Path(__file__).resolve().parents[2]
# The pace leaves the lost node time to come back.
SMALL = ["--hidden=32", "--batch=2", "--pace=0.15"]


@pytest.mark.slow
@pytest.mark.dist
def test_one_node_is_lost_and_taken_in_again_without_losing_a_step(tmp_path: Path) -> None:
    path = f"{Path(fast_python()).parent}{os.pathsep}{os.environ['PATH']}"
    script = subprocess.Popen(
        ["bash", ROOT / "examples/elastic.sh", tmp_path / "run", "100", "2", *SMALL],
        env=clean_environment(PATH=path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = script.communicate(timeout=550)
    finally:
        if script.poll() is None:
            os.killpg(script.pid, signal.SIGKILL)
    assert script.returncode == 0, output
    logs = "".join(log.read_text() for log in (tmp_path / "run").glob("*.log"))
    ranks = {int(step): int(n) for step, n in re.findall(r"step (\d+): .*, (\d) ranks", logs)}
    assert set(range(10, 110, 10)) == set(ranks)
    # Killed after step 20 of 2 ranks, and started again after step 50.
    assert ranks[50] == 1
    assert ranks[100] == 2
    assert re.search(r"recovered step \d+ .* 0 steps lost.* 2 ranks", output)
