"""Each example as a user starts it: what it prints, trains, saves and goes on from.

Where plans can't matter, a run on a single device without a restart says what steps must come to.
"""

import csv
import math
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.fast_python import fast_python
from tests.processes import clean_environment
from tests.scripts import run_python

ROOT = Path(__file__).resolve().parents[2]
SMALL: dict[str, dict[str, Any]] = {
    "hetero": {
        "--trainer.val_check_interval": 3,
        "--trainer.limit_val_batches": 1,
        "--trainer.log_every_n_steps": 1,
        "--model.model.hidden_size": 32,
        "--data.tokens_per_step": 512,
        "--data.context_length": 128,
    },
    "finetune_hf": {
        "--trainer.max_steps": 6,
        "--trainer.val_check_interval": 6,
        "--trainer.limit_val_batches": 1,
        "--model.config.hidden_size": 32,
    },
    "qlora": {
        "--trainer.max_steps": 6,
        "--trainer.limit_val_batches": 0,
        "--model.config.hidden_size": 64,
    },
}
TOKENS = {
    "--data.context_length": 48,
    "--data.samples_per_batch": 3,
    "--data.vocab_size": 300,
    "--data.shuffle": "false",
}
PLAIN = {"--trainer.strategy": "auto", "--trainer.devices": 1}

pytestmark = [pytest.mark.slow, pytest.mark.dist]


def run_example(
    folder: Path, name: str, *options: Any, num_processes: int = 1, code: int = 0, **variables: str
) -> str:
    """Run an example there; return what it printed."""
    command = [ROOT / f"examples/{name}.py", *options]
    found, output = run_python(command, folder=folder, num_processes=num_processes, **variables)
    assert found == code, output
    return output


def fit(folder: Path, name: str, *, num_processes: int = 1, code: int = 0, **options: Any) -> str:
    """Run an example with a command line of Lightning's, on little data."""
    given = {"--trainer.enable_progress_bar": "false", "--data.max_files": 20, **SMALL[name]}
    given |= {} if name == "hetero" else TOKENS
    words = [f"{key}={value}" for key, value in {**given, **options}.items()]
    config = ["fit", "--config", ROOT / f"examples/{name}.yaml"]
    return run_example(folder, name, *config, *words, num_processes=num_processes, code=code)


def logged(folder: Path, name: str) -> list[dict[str, str]]:
    """Return the rows of the newest log of an example."""
    logs = (folder / f"outputs/{name}/logs").iterdir()
    newest = max(logs, key=lambda path: path.stat().st_mtime)
    return list(csv.DictReader((newest / "metrics.csv").read_text().splitlines()))


def losses_of(folder: Path, name: str) -> dict[int, float]:
    """Return the newest run's losses by step."""
    rows = logged(folder, name)
    return {int(row["step"]): float(row["train_loss"]) for row in rows if row["train_loss"]}


@pytest.mark.parametrize("options", [["--single"], []], ids=["one process", "three"])
def test_train_text_trains_saves_and_samples(tmp_path: Path, options: list[str]) -> None:
    small = "--steps 4 --batch 2 --microbatches 2 --context 32 --hidden 32 --sample-tokens 20"
    output = run_example(tmp_path, "train_text", *small.split(), "--out", tmp_path, *options)
    (checkpoint,) = tmp_path.glob("*.ckpt")
    assert str(checkpoint) in output.replace("\n", "")
    kind = "plain Lightning" if options else "pipeline  stage  ranks"
    for words in ("4 steps", "tokens/s", "train loss", "val loss", "def read_", "Try next", kind):
        assert words in output
    assert output.count("trained     4 steps") == 1


def test_hetero_runs_logs_saves_and_goes_on(tmp_path: Path) -> None:
    wrong = {"--trainer.strategy.init_args.num_candidate_plan": 2}
    assert "num_candidate_plan" in fit(tmp_path, "hetero", code=2, **wrong)
    logs = []
    for steps, num_processes in ((6, 1), (8, 4)):  # The first run starts its processes itself.
        output = fit(
            tmp_path, "hetero", num_processes=num_processes, **{"--trainer.max_steps": steps}
        )
        assert output.count("HeteroStrategy on 2 × ") == 1
        assert "samples of up to 128, by a measured profile" in output
        assert "no mix of pipelines can be faster than" in output
        assert "\x1b" not in output
        logs.append(logged(tmp_path, "hetero"))
    measured = [row for row in logs[0] if row["run/tokens_per_s"]]
    assert len(measured) == 6
    for row in measured:
        assert 0 <= float(row["run/bubble_share"]) <= 1
        assert float(row["run/planning_stall_s"]) >= 0
    # The second run went on where the first had saved.
    assert [int(row["step"]) for row in logs[1] if row["run/tokens_per_s"]] == [7, 8]
    assert all(math.isfinite(float(row["val_loss"])) for row in logs[0] if row["val_loss"])
    assert (tmp_path / "outputs/hetero/events.jsonl").is_file()
    assert any((tmp_path / "outputs/hetero/checkpoints").glob("step-*8-*"))


def test_finetune_hf_trains_as_one_process_does_and_goes_on_from_what_it_wrote(
    tmp_path: Path,
) -> None:
    plain = {**PLAIN, "--data.samples_per_batch": 6}
    output = fit(tmp_path, "finetune_hf")
    losses = losses_of(tmp_path, "finetune_hf")
    assert "HeteroStrategy, world size 3, 32-true" in output
    assert "It writes, after 'def read_'" in output
    assert len(losses) == 6
    assert losses[5] < losses[0] - 0.2
    fit(tmp_path, "finetune_hf", **plain, **{"--model.output": "plain"})
    assert losses == pytest.approx(losses_of(tmp_path, "finetune_hf"), rel=1e-5)

    folder = tmp_path / "outputs/finetune_hf/model"
    assert AutoTokenizer.from_pretrained(folder).decode([0]) == "<|end|>"
    assert AutoModelForCausalLM.from_pretrained(folder).config.hidden_size == 32
    more = {"--model.folder": folder, "--model.output": "more"}
    unvalidated = {**more, "--trainer.limit_val_batches": 0}
    output = fit(tmp_path, "finetune_hf", num_processes=3, **unvalidated)
    later = losses_of(tmp_path, "finetune_hf")
    assert f"from {folder}" in output
    assert "val loss    nan" in output
    assert max(later.values()) < losses[0]
    fit(tmp_path, "finetune_hf", **plain, **more)
    assert later == pytest.approx(losses_of(tmp_path, "finetune_hf"), rel=1e-5)


def test_qlora_trains_adapters_of_a_4_bit_model_in_two_stages_as_one_process_does(
    tmp_path: Path,
) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    assert "read back by PEFT" in fit(tmp_path, "qlora")
    losses = losses_of(tmp_path, "qlora")
    assert len(losses) == 6
    fit(tmp_path, "qlora", **PLAIN)
    assert losses == pytest.approx(losses_of(tmp_path, "qlora"), rel=1e-5)


def test_composed_in_two_orders_of_callbacks_is_one_run_through_an_s3_store(
    tmp_path: Path, s3: Any
) -> None:
    small = [
        "--every=2",
        "--hidden=32",
        "--tokens=512",
        "--context=128",
        "--files=20",
        "--slowdowns",
    ]
    alone, folder = (tmp_path / name for name in ("alone", "store"))
    alone.mkdir()
    folder.mkdir()
    run_example(alone, "composed", "--steps", "6", *small, "1")
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    store = ["--store", "s3://bucket/composed", "--endpoint-url", f"http://127.0.0.1:{s3.port}"]
    store += [*small, "2", "4"]
    # The first run starts its processes itself.
    first = run_example(folder, "composed", "--steps", "4", *store, **keys)
    losses = losses_of(folder, "composed")
    second = run_example(
        folder, "composed", "--steps", "6", "--reverse", *store, num_processes=2, **keys
    )
    later = losses_of(folder, "composed")
    assert losses.keys() == {0, 1, 2, 3}
    assert later.keys() == {4, 5}
    assert losses | later == pytest.approx(losses_of(alone, "composed"), rel=1e-4)
    assert "diary       4 steps in 1 runs" in first
    assert "diary       6 steps in 2 runs" in second
    for output in (first, second):
        assert output.count("diary  ") == output.count("HeteroStrategy on ") == 1
        assert "\x1b" not in output
        assert len(re.findall(r"Epoch 0/999", output)) == 1
    assert list(folder.rglob("*.safetensors")) == []
    assert list(folder.glob("outputs/composed/best/*.ckpt"))


@pytest.mark.timeout(900)
def test_soak_takes_faults_and_ends_as_undisturbed(tmp_path: Path) -> None:
    """A worker is killed, the remote store answers 500 and a node is lost."""
    output = run_example(tmp_path, "soak", "3", f"--out={tmp_path / 'soak'}", "--seed=8")
    assert "every step was trained; losses differ by" in output
    (total,) = (line.split() for line in output.splitlines() if line.startswith("all "))
    assert total[1] == "3"


def test_elastic_loses_a_node_and_takes_it_in_again_without_losing_a_step(tmp_path: Path) -> None:
    """Two real torchrun agents, of which one is killed and comes back, as a user starts them."""
    path = f"{Path(fast_python()).parent}{os.pathsep}{os.environ['PATH']}"
    # The pace leaves the lost node time to come back.
    small = ["--hidden=32", "--batch=2", "--pace=0.15"]
    script = subprocess.Popen(
        ["bash", ROOT / "examples/elastic.sh", tmp_path / "run", "100", "2", *small],
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
