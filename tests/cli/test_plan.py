"""What a user sees of `lightning-hetero plan`, and what bad input says."""

import subprocess
import sys

import pytest

from lightning_hetero.cli import main
from lightning_hetero.core.plan import ParallelPlan

CLUSTER = """
nodes:
  - {device: A100-80GB, count: 4, price_per_hour: 10}
  - {device: H800-80GB, count: 2, price_per_hour: 20}
"""
SIZES = "--model gpt-neo-2.7b --sequence-length 2048 --global-batch-size 32"


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "c.yaml").write_text(CLUSTER)
    return f"plan --cluster c.yaml {SIZES}".split()


def test_prints_the_plan_its_bound_and_the_runners_up_and_writes_both_files(words, capsys):
    pytest.importorskip("matplotlib")
    assert main([*words, "--output", "plan.json", "--plot", "plan.svg"]) == 0
    captured = capsys.readouterr()
    for text in (
        "A100-80GB",
        "H800-80GB",
        "iteration time",
        "65,536 tokens an iteration",
        "no plan can be faster than",
        "limited by",
        "per 10⁹ tokens",
        "Best plans",
    ):
        assert text in captured.out
    assert captured.err == ""
    written = ParallelPlan.load("plan.json")
    assert sum(pipeline.num_microbatches for pipeline in written.pipelines) == 32
    with open("plan.svg", encoding="utf-8") as file:
        assert file.read(5) == "<?xml"


def test_the_written_plan_simulates_to_the_predicted_time(words, capsys):
    assert main([*words, "--output", "plan.json", "--top", "1"]) == 0
    planned = capsys.readouterr().out
    assert "Best plans" not in planned
    assert main(f"simulate plan.json --cluster c.yaml {SIZES}".split()) == 0
    simulated = capsys.readouterr().out

    def line(text):
        return next(row for row in text.splitlines() if row.startswith("iteration time"))

    assert line(planned) == line(simulated)


def test_cost_may_leave_devices_idle(words, capsys):
    assert main([*words, "--objective", "cost"]) == 0
    assert "idle" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cluster", "options", "message"),
    [
        ("nodes: [{device: A100, count: 4}]", "", "Unknown device 'A100'. Known:"),
        ("nodes: []", "", "0 devices"),
        ("nodes: [{device: T4, count: 0}]", "", "Leave a node without devices out"),
        ("nodes: [{device: T4, count: 1}]", "", "fits nowhere"),
        (CLUSTER, "--tp-degrees 8", "largest node has 4"),
        (CLUSTER, "--tp-degrees 3", "doesn't divide"),
        (CLUSTER, "--profile broken.json", "not valid JSON"),
        (CLUSTER, "--profile none.json", "Can't read the profile"),
        (CLUSTER, "--global-batch-size 0", "must be 1 or more"),
        (CLUSTER, "--top 0", "--top is 0; it must be 1 or more"),
        (CLUSTER, "--output no/such/folder/plan.json", "Can't write"),
        (
            "nodes: [{device: T4, count: 1}, {device: T4, count: 1}]\n"
            "links: [{nodes: [0, 1], bytes_per_s: 1e9}, {nodes: [1, 0], bytes_per_s: 2e9}]",
            "",
            "contradict each other",
        ),
        ("nodes: [{device: A100-80GB, count: 4}]", "--objective cost", "price_per_hour"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, tmp_path, capsys, cluster, options, message):
    (tmp_path / "c.yaml").write_text(cluster)
    (tmp_path / "broken.json").write_text("{")
    assert main([*words, *options.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_no_command_and_unknown_commands_are_refused(capsys):
    for arguments in ([], ["plna"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "simulate", "profile", "checkpoint", "stragglers"])
def test_help_fits_a_terminal_of_80_columns(monkeypatch, capsys, command):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    assert max(map(len, lines)) <= 80


def test_the_module_runs_as_a_script():
    done = subprocess.run(
        [sys.executable, "-m", "lightning_hetero.cli", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "plan" in done.stdout


def test_planning_without_the_installed_script_loads_no_torch_either():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "lightning_hetero.cli", "plan", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "lightning_hetero.planner" in loaded
    assert not {"torch", "lightning"} & loaded
