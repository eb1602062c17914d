"""What is wrong on an example's command line is said before anything starts."""

from pathlib import Path

from tests.examples.test_runs import fit


def test_hetero_refuses_a_wrong_option_when_it_is_parsed(tmp_path: Path) -> None:
    wrong = {"--trainer.strategy.init_args.num_candidate_plan": 2}
    assert "num_candidate_plan" in fit(tmp_path, "hetero", code=2, **wrong)
