from pathlib import Path

import pytest

from tests.scripts import run_python

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--steps", "4", "--batch", "2", "--microbatches", "2", "--context", "32", "--hidden", "32"]
SMALL += ["--sample-tokens", "20"]


def run_main_job(folder, *options):
    command = [ROOT / "examples/train_text.py", *SMALL, "--out", folder, *options]
    code, output = run_python(command, folder=folder)
    assert code == 0, output
    return output


def check_report(output, folder):
    (checkpoint,) = folder.glob("*.ckpt")
    assert str(checkpoint) in output.replace("\n", "")
    for words in ("4 steps", "tokens/s", "train loss", "val loss", "def read_", "Try next"):
        assert output.count(words) >= 1, words
    assert output.count("trained     4 steps") == 1


@pytest.mark.slow
def test_single_process_trains_saves_and_samples(tmp_path):
    output = run_main_job(tmp_path, "--single")
    check_report(output, tmp_path)
    assert "plain Lightning" in output


@pytest.mark.slow
@pytest.mark.dist
def test_three_processes_train_in_the_asymmetric_plan(tmp_path):
    output = run_main_job(tmp_path)
    check_report(output, tmp_path)
    assert "pipeline  stage  ranks" in output
