import csv
from pathlib import Path

import pytest

from tests.scripts import run_python

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "--trainer.max_steps": 6,
    "--trainer.limit_val_batches": 0,
    "--trainer.enable_progress_bar": "false",
    "--data.context_length": 48,
    "--data.samples_per_batch": 3,
    "--data.max_files": 20,
    "--data.vocab_size": 300,
    "--data.shuffle": "false",
    "--model.config.hidden_size": 64,
}
PLAIN = {"--trainer.strategy": "auto", "--trainer.devices": 1}


def train(folder: Path, **options: object) -> tuple[str, list[float]]:
    """Run the example there; return what it printed and its losses."""
    command = [ROOT / "examples/qlora.py", "fit", "--config", ROOT / "examples/qlora.yaml"]
    command += [f"{name}={value}" for name, value in {**SMALL, **options}.items()]
    code, output = run_python(command, folder=folder)
    assert code == 0, output
    newest = max((folder / "outputs/qlora/logs").iterdir(), key=lambda p: p.stat().st_mtime)
    with (newest / "metrics.csv").open() as file:
        losses = [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]
    return output, losses


@pytest.mark.slow
@pytest.mark.dist
def test_two_stages_train_adapters_of_a_4_bit_model_as_one_process_does(tmp_path: Path) -> None:
    output, losses = train(tmp_path)
    assert "read back by PEFT" in output
    assert len(losses) == 6
    _, expected = train(tmp_path, **PLAIN)
    assert losses == pytest.approx(expected, rel=1e-5)
