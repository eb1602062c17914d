import csv
import math
from pathlib import Path

import pytest

from tests.scripts import run_python

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "--trainer.val_check_interval": 3,
    "--trainer.limit_val_batches": 1,
    "--trainer.log_every_n_steps": 1,
    "--trainer.enable_progress_bar": "false",
    "--model.model.hidden_size": 32,
    "--data.max_files": 20,
    "--data.tokens_per_step": 512,
    "--data.context_length": 128,
}


def fit(folder, num_processes=1, **options):
    """Run the example there; return its exit code and what it printed."""
    command = [ROOT / "examples/hetero.py", "fit", "--config", ROOT / "examples/hetero.yaml"]
    command += [f"{name}={value}" for name, value in {**SMALL, **options}.items()]
    return run_python(command, folder=folder, num_processes=num_processes)


@pytest.mark.slow
@pytest.mark.dist
def test_everything_at_once_runs_logs_saves_and_goes_on(tmp_path):
    for steps, num_processes in ((6, 1), (8, 4)):  # The first run starts its processes itself.
        code, output = fit(tmp_path, num_processes, **{"--trainer.max_steps": steps})
        assert code == 0, output
        assert output.count("HeteroStrategy on 2 × ") == 1
        assert "samples of up to 128, by a measured profile" in output
        assert "no mix of pipelines can be faster than" in output
        assert "\x1b" not in output
    logs = sorted((tmp_path / "outputs/hetero/logs").iterdir())
    rows = [
        list(csv.DictReader((folder / "metrics.csv").read_text().splitlines())) for folder in logs
    ]
    measured = [row for row in rows[0] if row["run/tokens_per_s"]]
    assert len(measured) == 6
    for row in measured:
        assert float(row["run/tokens_per_s"]) > 0
        assert 0 <= float(row["run/bubble_share"]) <= 1
        assert 0 <= float(row["run/imbalance"]) <= 1
        assert float(row["run/exchange_wait_s"]) >= 0
        assert float(row["run/planning_stall_s"]) >= 0
    # The second run went on where the first had saved.
    assert [int(row["step"]) for row in rows[1] if row["run/tokens_per_s"]] == [7, 8]
    assert all(math.isfinite(float(row["val_loss"])) for row in rows[0] if row["val_loss"])
    assert (tmp_path / "outputs/hetero/events.jsonl").is_file()
    assert any((tmp_path / "outputs/hetero/checkpoints").glob("step-*8-*"))


def test_a_wrong_option_is_refused_when_it_is_parsed(tmp_path):
    code, output = fit(tmp_path, **{"--trainer.strategy.init_args.num_candidate_plan": 2})
    assert code == 2
    assert "num_candidate_plan" in output
