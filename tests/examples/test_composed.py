"""The composed example against a real S3 server: it resumes from there, in any order of callbacks.

One run on a single device without a restart says what every step must come to.
"""

import csv
import re
from pathlib import Path

import pytest

from tests.scripts import run_python

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--every=2", "--hidden=32", "--tokens=512", "--context=128", "--files=20", "--slowdowns"]


def run(folder, *options, num_processes=1, **variables):
    """Run the example there; return what it printed and the losses of its steps."""
    command = [ROOT / "examples/composed.py", *options]
    code, output = run_python(command, folder=folder, num_processes=num_processes, **variables)
    assert code == 0, output
    newest = max((folder / "outputs/composed/logs").iterdir(), key=lambda p: p.stat().st_mtime)
    rows = list(csv.DictReader((newest / "metrics.csv").read_text().splitlines()))
    losses = {int(row["step"]): float(row["train_loss"]) for row in rows if row["train_loss"]}
    return output, losses


@pytest.mark.slow
@pytest.mark.dist
def test_runs_in_two_orders_of_callbacks_are_one_run_through_an_s3_store(tmp_path, s3):
    folders = [tmp_path / name for name in ("alone", "store")]
    for folder in folders:
        folder.mkdir()
    _, expected = run(folders[0], "--steps", "6", *SMALL, "1")
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    store = ["--store", "s3://bucket/composed", "--endpoint-url", f"http://127.0.0.1:{s3.port}"]
    store += [*SMALL, "2", "4"]
    first, losses = run(folders[1], "--steps", "4", *store, **keys)
    # The first run has started its processes itself.
    second, later = run(folders[1], "--steps", "6", "--reverse", *store, num_processes=2, **keys)
    assert losses.keys() == {0, 1, 2, 3}
    assert later.keys() == {4, 5}
    assert losses | later == pytest.approx(expected, rel=1e-4)
    assert "diary       4 steps in 1 runs" in first
    assert "diary       6 steps in 2 runs" in second
    for output in (first, second):
        assert output.count("diary  ") == output.count("HeteroStrategy on ") == 1
        assert "\x1b" not in output
        assert len(re.findall(r"Epoch 0/999", output)) == 1
    assert list(folders[1].rglob("*.safetensors")) == []
    assert list(folders[1].glob("outputs/composed/best/*.ckpt"))
