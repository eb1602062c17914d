"""The composed example against a real S3 server: it resumes from there, in any order of callbacks.

One run on a single device without a restart says what every step must come to.
"""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.callbacks.servers import S3Server
from tests.processes import clean_environment

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--every=2", "--hidden=32", "--tokens=512", "--context=128", "--files=20", "--slowdowns"]


def run(folder, *options, **variables):
    """Run the example there; return what it printed and the losses of its steps."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples/composed.py", *options],
        cwd=folder,
        env=clean_environment() | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    newest = max((folder / "outputs/composed/logs").iterdir(), key=lambda p: p.stat().st_mtime)
    rows = list(csv.DictReader((newest / "metrics.csv").read_text().splitlines()))
    losses = {int(row["step"]): float(row["train_loss"]) for row in rows if row["train_loss"]}
    return output, losses


@pytest.mark.slow
@pytest.mark.dist
def test_runs_in_two_orders_of_callbacks_are_one_run_through_an_s3_store(tmp_path):
    folders = [tmp_path / name for name in ("alone", "store")]
    for folder in folders:
        folder.mkdir()
    _, expected = run(folders[0], "--steps", "6", *SMALL, "1")
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    with S3Server() as server:
        address = f"http://127.0.0.1:{server.port}"
        store = ["--store", "s3://bucket/run", "--endpoint-url", address]
        first, losses = run(folders[1], "--steps", "4", *store, *SMALL, "2", "4", **keys)
        second, later = run(
            folders[1], "--steps", "6", "--reverse", *store, *SMALL, "2", "4", **keys
        )
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
