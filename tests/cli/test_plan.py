"""What a user sees of `lightning-hetero plan`, and what bad input says."""

import io
import json
import re
import subprocess
import sys
from importlib.metadata import version

import pytest

from lightning_hetero.cli import main
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.simulator import MemoryTerms

CLUSTER = """
nodes:
  - {device: A100-80GB, count: 4, price_per_hour: 10}
  - {device: H800-80GB, count: 2, price_per_hour: 20}
"""
SIZES = "--model gpt-neo-2.7b --sequence-length 2048 --global-batch-size 32 --micro-batch-size 1"


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "c.yaml").write_text(CLUSTER)
    return f"plan --cluster c.yaml {SIZES}".split()


def test_prints_the_plan_its_bound_and_the_runners_up_and_writes_both_files(words, capsys):
    pytest.importorskip("matplotlib")
    files = ["--output", "plan.json", "--plot", "plan.svg"]
    # By default it chooses the size of micro-batches, too.
    assert main([*words[:-2], *files]) == 0
    captured = capsys.readouterr()
    for text in (
        "A100-80GB",
        "H800-80GB",
        "iteration time",
        "65,536 tokens an iteration",
        "no plan can be faster than",
        "limited by",
        "per billion tokens (in the currency of price_per_hour)",
        "compared with   plain data parallel: ",
        "assumes         bf16-mixed, Adam (2 + 4 bytes a parameter held, 16 owned), data sheets",
    ):
        assert text in captured.out
    assert captured.err == ""
    assert main([*words[:-2], "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["micro_batch_size"] in {1, 2, 4, 8}
    for stage in facts["stages"]:
        terms = [stage[f"{term}_bytes"] for term in MemoryTerms._fields]
        assert sum(terms) == pytest.approx(stage["memory_bytes"], abs=len(terms))
        assert {"recompute_s", "recomputed_layers", "activation_budget_bytes"} <= stage.keys()
        assert min(stage["weights_bytes"], stage["owned_bytes"], stage["activations_bytes"]) > 0
    written = ParallelPlan.load("plan.json")
    num_microbatches = sum(pipeline.num_microbatches for pipeline in written.pipelines)
    assert num_microbatches * facts["micro_batch_size"] == 32
    with open("plan.svg", encoding="utf-8") as file:
        assert file.read(5) == "<?xml"


def test_the_written_plan_simulates_to_the_predicted_time(words, capsys):
    assert main([*words, "--output", "plan.json"]) == 0
    planned = capsys.readouterr().out
    assert main(f"simulate plan.json --cluster c.yaml {SIZES}".split()) == 0
    simulated = capsys.readouterr().out

    def line(text):
        return next(row for row in text.splitlines() if row.startswith("iteration time"))

    assert line(planned) == line(simulated)


def test_cost_may_leave_devices_idle(words, capsys):
    assert main([*words, "--objective", "cost"]) == 0
    assert "idle" in capsys.readouterr().out


def test_a_terminal_is_told_what_the_search_does(words, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert main([*words]) == 0
    assert "Done" in sys.stderr.getvalue()


def test_json_holds_what_the_tables_say_and_nothing_it_is_compared_with_is_faster(words, capsys):
    assert main([*words, "--json", "--precision", "bf16-true"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["precision"] == "bf16-true"
    assert found["tokens_per_iteration"] == 65536
    assert found["lower_bound_s"] <= found["iteration_time_s"]
    assert found["cluster"] == {"A100-80GB": 4, "H800-80GB": 2}
    assert ParallelPlan.from_dict(found["plan"]).num_layers == 32
    baselines = {entry["name"]: entry["iteration_time_s"] for entry in found["baselines"]}
    assert list(baselines) == ["plain data parallel", "equal pipelines"]
    assert found["iteration_time_s"] <= min(baselines.values())


def test_precision_decides_what_fits(words, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("nodes: [{device: A10, count: 3}]")
    options = ["--tp-degrees", "1", "--json", "--sequence-length", "512"]
    needed = {}
    for precision in ("bf16-true", "bf16-mixed", "32-true"):
        code = main([*words, *options, "--precision", precision])
        output = capsys.readouterr().out
        needed[precision] = (
            max(stage["memory_bytes"] for stage in json.loads(output)["stages"])
            if code == 0
            else float("inf")
        )
    assert needed["bf16-true"] < needed["bf16-mixed"] < needed["32-true"]


def test_bf16_on_cards_without_it_is_planned_at_its_real_rate_and_said(words, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("nodes: [{device: V100-32GB, count: 4}]")
    seconds = {}
    for precision in ("bf16-mixed", "16-mixed", "32-true"):
        assert main([*words, "--precision", precision]) == 0
        output = " ".join(capsys.readouterr().out.split())
        seconds[precision] = float(output.split("iteration time ")[1].split()[0])
        assert f"assumes {precision}, Adam" in output
        note = "V100-32GB has no bf16 units and runs it at the rate of fp32"
        assert (note in output) == (precision == "bf16-mixed")
    assert seconds["bf16-mixed"] > 4 * seconds["16-mixed"]
    assert seconds["32-true"] > seconds["bf16-mixed"]


def test_what_cannot_be_written_or_drawn_is_said_before_planning(words, monkeypatch, capsys):
    monkeypatch.setattr("lightning_hetero.cli.plan.plan", None)
    assert main([*words, "--output", "no/where.json"]) == 2
    assert "folder doesn't exist" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main([*words, "--plot", "plan.svg"]) == 2
    assert "pip install 'lightning-hetero[plot]'" in capsys.readouterr().err


def test_a_wrong_file_is_not_repeated_in_the_error(words, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("nodes: [" + "x, " * 10_000 + "x]")
    assert main(words) == 2
    assert len(capsys.readouterr().err) < 300


@pytest.mark.filterwarnings("default")
def test_a_rate_in_the_wrong_unit_is_one_line_of_warning(words, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text(CLUSTER + "inter_node_bytes_per_s: 50\n")
    assert main([*words, "--tp-degrees", "1"]) == 0
    error = capsys.readouterr().err
    assert "warning: `inter_node_bytes_per_s` is 50" in error
    assert error.count("\n") == 1


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"lightning-hetero {version('lightning-hetero')}\n"


@pytest.mark.parametrize(
    ("cluster", "options", "message"),
    [
        ("nodes: [{device: A1000, count: 4}]", "", "Unknown device 'A1000'. Did you mean A10"),
        ("nodes: []", "", "0 devices"),
        ("nodes: [{device: T4, count: 0}]", "", "Leave a node without devices out"),
        ("nodes: [{device: T4, count: 1}]", "", "fits nowhere"),
        (CLUSTER, "--tp-degrees 8", "largest node has 4"),
        (CLUSTER, "--tp-degrees 3", "doesn't divide"),
        (CLUSTER, "--profile broken.json", "not valid JSON"),
        (CLUSTER, "--profile none.json", "Can't read the profile"),
        (CLUSTER, "--global-batch-size 0", "must be 1 or more"),
        (CLUSTER, "--output no/such/folder/plan.json", "Can't write"),
        (CLUSTER, "--plot plan.jpg", "must end in .svg, .png, .pdf or .html"),
        (CLUSTER, "--model nobody/knows", "hf download nobody/knows config.json"),
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


_CHECKPOINT = [f"checkpoint {action}" for action in ("list", "verify", "export", "reject")]


@pytest.mark.parametrize("word", ["--sequence-lenth=8", "--sequence-lenth"])
def test_a_misspelled_option_is_named_before_the_required_ones(capsys, word):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--clus", "c.yaml", word])  # Options may be shortened.
    assert stop.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("There is no option --sequence-lenth. Did you mean --sequence-length?")


@pytest.mark.parametrize(
    "command",
    ["plan", "simulate", "compare", "profile", "checkpoint", "stragglers", *_CHECKPOINT],
)
def test_help_fits_a_terminal_of_80_columns(monkeypatch, capsys, command):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    usage, sentence, *_ = text.split("\n\n")
    assert usage.startswith("usage: ")
    assert sentence[0].isupper()
    assert sentence.endswith(".")
    assert not re.search(r"^  \S+\n(?!    )", text, re.MULTILINE), "an argument says nothing"


def test_planning_without_the_installed_script_loads_no_torch_either():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "lightning_hetero.cli", "plan", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("usage: ")
    loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "lightning_hetero.planner" in loaded
    assert not {"torch", "lightning"} & loaded
