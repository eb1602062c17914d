"""What a user sees of `lightning-hetero compare`."""

import json

import pytest

from lightning_hetero.cli import main
from lightning_hetero.core.plan import ParallelPlan

CLUSTER = "nodes: [{device: A100, count: 4, price_per_hour: 10}, {device: H800, count: 4}]"


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "c.yaml").write_text(CLUSTER.replace("A100", "A100-40GB"))
    for name, num_stages in (("a", 2), ("b", 4)):
        plan = ParallelPlan.even(world_size=8, num_layers=24, num_stages=num_stages)
        plan.save(tmp_path / f"{name}.json")
    sizes = "--model bert-large --sequence-length 512 --global-batch-size 64"
    return f"--cluster c.yaml {sizes}".split()


def test_the_totals_and_the_ranks_that_differ_are_shown(words, capsys):
    assert main(["compare", "a.json", "b.json", *words]) == 0
    output = capsys.readouterr().out
    for text in ("iteration (s)", "tokens/s", "largest memory", "limited by", "Ranks that differ"):
        assert text in output
    assert "0-11" in output
    assert "0-5" in output


def test_a_plan_is_no_different_from_itself(words, capsys):
    assert main(["compare", "a.json", "a.json", *words]) == 0
    output = capsys.readouterr().out
    assert "Every rank does the same in both." in output
    assert "+0 (+0.0%)" in output


def test_json_holds_both_plans_and_their_traffic(words, capsys):
    assert main(["compare", "a.json", "b.json", *words, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert plans["A"]["exchanged_bytes"] > plans["B"]["exchanged_bytes"]
    # Each boundary carries every token's hidden state and its gradient once, in 16 bits.
    tokens = 64 * 512
    assert plans["A"]["hidden_state_bytes"] == 2 * 1 * tokens * 1024 * 2
    assert plans["B"]["hidden_state_bytes"] == 2 * 3 * tokens * 1024 * 2


@pytest.mark.parametrize(
    ("files", "message"),
    [(["a.json", "none.json"], "Can't read the plan none.json"), (["a.json", "c.yaml"], "no")],
)
def test_bad_input_is_one_line_and_exit_code_2(words, files, message, capsys):
    assert main(["compare", *files, *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_of_two_plans_the_one_that_does_not_fit_is_named(words, capsys):
    ParallelPlan.even(world_size=8, num_layers=4, num_stages=2).save("small.json")
    assert main(["compare", "a.json", "small.json", *words]) == 2
    assert "small.json: The plan covers 4 layers" in capsys.readouterr().err
