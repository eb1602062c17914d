"""What a user sees of `lightning-hetero simulate` and `compare`."""

import json

import pytest

from lightning_hetero.cli import main
from lightning_hetero.core.plan import ParallelPlan

CLUSTER = """
nodes:
  - {device: A100-80GB, count: 4, price_per_hour: 10}
  - {device: H800-80GB, count: 4, price_per_hour: 20}
"""


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "c.yaml").write_text(CLUSTER)
    ParallelPlan.even(world_size=8, num_layers=24, num_stages=2, tp_degree=2).save("plan.json")
    for name, num_stages in (("a", 2), ("b", 4)):
        ParallelPlan.even(world_size=8, num_layers=24, num_stages=num_stages).save(f"{name}.json")
    ParallelPlan.even(world_size=8, num_layers=4, num_stages=2).save("small.json")
    sizes = "--model bert-large --sequence-length 512 --global-batch-size 64"
    return f"simulate plan.json --cluster c.yaml {sizes}".split()


def test_prints_every_stage_and_writes_a_picture_and_json_says_the_same(words, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main([*words, "--plot", "p.svg"]) == 0
    output = capsys.readouterr().out
    for text in (
        "A100-80GB",
        "H800-80GB",
        "12-23 (12)",
        "iteration time",
        "32,768 tokens an iteration",
        "per billion tokens (in the currency of price_per_hour)",
        "assumes         bf16-mixed",
    ):
        assert text in output
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens_per_iteration"] == 32768
    assert found["price_per_billion_tokens"] > 0
    assert [stage["ranks"] for stage in found["stages"]] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert main([*words, "--micro-batch-size", "64", "--sequence-length", "8192"]) == 0
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "llama-0b"], "Unknown model"),
        (["--model", "lama-7b"], "Did you mean llama-7b?"),
        (["--model", "llama-7b"], "covers 24 layers"),
        (["--cluster", "none.yaml"], "Can't read the cluster"),
        (["--profile", "c.yaml"], "not valid JSON"),
        (["--sequence-length", "0"], "1 or more"),
        (["--micro-batch-size", "3"], "multiple"),
        (["--plot", "p.jpg"], "must end in .svg, .png, .pdf or .html"),
        (["--sequence-length", "9" * 30], "no more than"),
        ("compare a.json none.json", "Can't read the plan none.json"),
        ("compare a.json small.json", "small.json: The plan covers 4 layers"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, change, message, capsys):
    arguments = [*change.split(), *words[2:]] if isinstance(change, str) else [*words, *change]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_of_two_plans_the_totals_the_traffic_and_the_ranks_that_differ_are_shown(words, capsys):
    assert main(["compare", "a.json", "b.json", *words[2:]]) == 0
    output = capsys.readouterr().out
    for text in ("iteration (s)", "tokens/s", "largest memory", "limited by", "Ranks that differ"):
        assert text in output
    assert "0-11" in output
    assert "0-5" in output
    assert main(["compare", "a.json", "a.json", *words[2:]]) == 0
    output = capsys.readouterr().out
    assert "Every rank does the same under both plans." in output
    assert "+0 (+0.0%)" in output
    assert main(["compare", "a.json", "b.json", *words[2:], "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert plans["A"]["exchanged_bytes"] > plans["B"]["exchanged_bytes"]
    # Each boundary carries every token's hidden state and its gradient once, in 16 bits.
    tokens = 64 * 512
    assert plans["A"]["hidden_state_bytes"] == 2 * 1 * tokens * 1024 * 2
    assert plans["B"]["hidden_state_bytes"] == 2 * 3 * tokens * 1024 * 2


@pytest.mark.parametrize("command", ["simulate plan.json", "compare plan.json plan.json"])
def test_rates_at_which_nothing_ever_ends_are_refused(words, tmp_path, capsys, command):
    rates = "memory_bytes_per_s: 1e-300 B/s, intra_node_bytes_per_s: 1e-300 B/s"
    device = f"{{name: d, peak_flops_per_s: 1e-300, memory_bytes: 80 GiB, {rates}}}"
    nodes = "[{device: d, count: 8, price_per_hour: 1}]"
    (tmp_path / "c.yaml").write_text(f"nodes: {nodes}\ndevices: [{device}]\n")
    assert main([*command.split(), *words[2:]]) == 2
    assert "take forever" in capsys.readouterr().err
