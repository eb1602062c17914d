import csv
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.scripts import run_python

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "--trainer.max_steps": 6,
    "--trainer.val_check_interval": 6,
    "--trainer.limit_val_batches": 1,
    "--trainer.enable_progress_bar": "false",
    "--data.context_length": 48,
    "--data.samples_per_batch": 3,
    "--data.max_files": 20,
    "--data.vocab_size": 300,
    "--data.shuffle": "false",
    "--model.config.hidden_size": 32,
}
PLAIN = {"--trainer.strategy": "auto", "--trainer.devices": 1, "--data.samples_per_batch": 6}


def fine_tune(folder, num_processes=1, **options):
    """Run the example there; return what it printed and its losses."""
    command = [ROOT / "examples/finetune_hf.py", "fit"]
    command += ["--config", ROOT / "examples/finetune_hf.yaml"]
    command += [f"{name}={value}" for name, value in {**SMALL, **options}.items()]
    code, output = run_python(command, folder=folder, num_processes=num_processes)
    assert code == 0, output
    newest = max((folder / "outputs/finetune_hf/logs").iterdir(), key=lambda p: p.stat().st_mtime)
    with (newest / "metrics.csv").open() as file:
        losses = [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]
    return output, losses


@pytest.mark.slow
@pytest.mark.dist
def test_three_processes_fine_tune_as_one_does_and_go_on_from_what_they_wrote(tmp_path):
    output, losses = fine_tune(tmp_path)
    assert "HeteroStrategy, world size 3, 32-true" in output
    assert "It writes, after 'def read_'" in output
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.2
    _, expected = fine_tune(tmp_path, **PLAIN, **{"--model.output": "plain"})
    assert losses == pytest.approx(expected, rel=1e-5)

    folder = tmp_path / "outputs/finetune_hf/model"
    assert AutoTokenizer.from_pretrained(folder).decode([0]) == "<|end|>"
    trained = AutoModelForCausalLM.from_pretrained(folder)
    assert trained.config.hidden_size == 32
    more = {"--model.folder": folder, "--model.output": "more"}
    unvalidated = {**more, "--trainer.limit_val_batches": 0}
    output, losses_from_there = fine_tune(tmp_path, num_processes=3, **unvalidated)
    assert f"from {folder}" in output
    assert "val loss    nan" in output
    assert max(losses_from_there) < losses[0]
    _, expected = fine_tune(tmp_path, **PLAIN, **more)
    assert losses_from_there == pytest.approx(expected, rel=1e-5)
