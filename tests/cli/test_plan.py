"""What a user sees of `lightning-hetero plan`, and what bad input says."""

import io
import json
import re
import subprocess
import sys

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


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_prints_the_plan_its_bound_and_progress_and_writes_a_plan_that_simulates_so(
    words, monkeypatch, capsys
):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert main([*words, "--output", "plan.json", "--plot", "plan.svg"]) == 0
    assert "Done" in terminal.getvalue()
    planned = capsys.readouterr().out
    for text in (
        "A100-80GB",
        "H800-80GB",
        "65,536 tokens an iteration",
        "no plan can be faster than",
        "limited by",
        "per billion tokens (in the currency of price_per_hour)",
        "compared with   plain data parallel: ",
        "assumes         bf16-mixed, Adam (2 + 4 bytes a parameter held, 16 owned), data sheets",
    ):
        assert text in planned
    with open("plan.svg", encoding="utf-8") as file:
        assert file.read(5) == "<?xml"
    assert main(f"simulate plan.json --cluster c.yaml {SIZES}".split()) == 0
    simulated = capsys.readouterr().out
    line = re.compile("^iteration time.*", re.MULTILINE)
    assert line.findall(planned) == line.findall(simulated) != []


def test_json_holds_what_the_tables_say_and_nothing_it_is_compared_with_is_faster(words, capsys):
    # By default it chooses the size of micro-batches, too.
    options = ["--json", "--precision", "bf16-true", "--tp-degrees", "1", "2"]
    assert main([*words[:-2], *options]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    found = json.loads(captured.out)
    written = ParallelPlan.from_dict(found["plan"])
    usual = found["micro_batch_size"]
    sizes = [(p.num_microbatches, p.microbatch_size or usual) for p in written.pipelines]
    assert sum(number * size for number, size in sizes) == 32
    for stage in found["stages"]:
        terms = [stage[f"{term}_bytes"] for term in MemoryTerms._fields]
        assert sum(terms) == pytest.approx(stage["memory_bytes"], abs=len(terms))
        assert {"recompute_s", "recomputed_layers", "activation_budget_bytes"} <= stage.keys()
        assert min(stage["weights_bytes"], stage["owned_bytes"], stage["activations_bytes"]) > 0
    assert found["precision"] == "bf16-true"
    assert found["tokens_per_iteration"] == 65536
    assert found["lower_bound_s"] <= found["iteration_time_s"]
    assert found["cluster"] == {"A100-80GB": 4, "H800-80GB": 2}
    assert written.num_layers == 32
    baselines = {entry["name"]: entry["iteration_time_s"] for entry in found["baselines"]}
    assert list(baselines) == ["plain data parallel", "equal pipelines"]
    assert found["iteration_time_s"] <= min(baselines.values())


def test_cost_may_leave_devices_idle(words, capsys):
    assert main([*words, "--objective", "cost", "--tp-degrees", "1"]) == 0
    assert "idle" in capsys.readouterr().out


def test_precision_decides_memory_and_bf16_on_cards_without_it_is_planned_at_its_real_rate(
    words, tmp_path, capsys
):
    (tmp_path / "c.yaml").write_text("nodes: [{device: V100-32GB, count: 2}]")
    seconds, needed = {}, {}
    words += ["--model", "bert-large", "--tp-degrees", "1"]
    for precision in ("bf16-true", "bf16-mixed", "16-mixed", "32-true"):
        assert main([*words, "--precision", precision]) == 0
        output = " ".join(capsys.readouterr().out.split())
        seconds[precision] = float(output.split("iteration time ")[1].split()[0])
        needed[precision] = max(map(float, re.findall(r"([0-9.]+) of [0-9.]+ ", output)))
        assert f"assumes {precision}, Adam" in output
        note = "V100-32GB has no bf16 units and runs it at the rate of fp32"
        assert (note in output) == precision.startswith("bf16")
        if precision == "bf16-mixed":
            other_s = float(
                output.split(" s with the best plan for --precision 16-mixed")[0].split()[-1]
            )
    assert other_s == seconds["16-mixed"]
    assert seconds["bf16-mixed"] > 4 * seconds["16-mixed"]
    assert seconds["32-true"] > seconds["bf16-mixed"]
    assert needed["bf16-true"] < needed["bf16-mixed"] < needed["32-true"]


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
    assert main([*words, "--tp-degrees", "1", "--model", "bert-large"]) == 0
    error = capsys.readouterr().err
    assert "warning: `inter_node_bytes_per_s` is 50" in error
    assert error.count("\n") == 1


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


_CHECKPOINT = [f"checkpoint {action}" for action in ("list", "verify", "export", "reject")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["plna"], "invalid choice: 'plna'"),
        # A misspelled option is named before the required ones; options may be shortened.
        (["plan", "--clus", "c.yaml", "--sequence-lenth=8"], "Did you mean --sequence-length?"),
        (["plan", "--clus", "c.yaml", "--sequence-lenth"], "Did you mean --sequence-length?"),
    ],
)
def test_unknown_commands_and_options_are_refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


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
