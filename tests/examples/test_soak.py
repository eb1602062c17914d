"""The drill as a user starts it, with few faults; 200 of them are for the README."""

import subprocess
from pathlib import Path

import pytest

from tests.fast_python import fast_python
from tests.processes import clean_environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(900)
def test_a_run_takes_faults_and_ends_as_undisturbed(tmp_path: Path) -> None:
    finished = subprocess.run(
        [fast_python(), ROOT / "examples/soak.py", "3", f"--out={tmp_path}", "--seed=3"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "every step was trained; losses differ by" in finished.stdout
    (total,) = (line.split() for line in finished.stdout.splitlines() if line.startswith("all "))
    assert total[1] == "3"
