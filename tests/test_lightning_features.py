"""What users do with Lightning around a run gives what it gives on one device."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests import lightning_features as features
from tests.processes import ProcessPool

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def planned(pool: ProcessPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("features")
    return pool.run(features.use_all, features.WORLD_SIZE, folder)


def near(value: Any) -> Any:
    return pytest.approx(value, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", features.FITS)
def test_a_feature_of_fit_gives_what_a_single_device_gives_on_every_rank(
    planned: list[dict[str, Any]], name: str
) -> None:
    alone = features.fit(name, planned=False)
    for result in planned:
        found = result["fits"][name]
        assert found["losses"] == near(alone["losses"])
        assert found["metrics"] == near(alone["metrics"])
        assert found["weights"] == near(alone["weights"])
        assert found["trainable"] == alone["trainable"]
        assert found["has_example"] == alone["has_example"]
        assert found["rates"] == alone["rates"]


def test_a_run_resumes_with_parameters_that_it_thawed(
    planned: list[dict[str, Any]], tmp_path: Path
) -> None:
    alone = features.thaw_and_resume(tmp_path, planned=False)
    for result in planned:
        assert result["resumed"]["losses"] == near(alone["losses"])
        assert result["resumed"]["weights"] == near(alone["weights"])


def test_every_prediction_is_written_by_its_index(planned: list[dict[str, Any]]) -> None:
    alone = features.write_predictions(planned=False)
    written: dict[int, Any] = {}
    for result in planned:
        written |= result["predictions"]
    assert written == alone


def test_a_hook_gathers_over_all_ranks(planned: list[dict[str, Any]]) -> None:
    assert [result["hook"][0] for result in planned] == [[0, 1, 2]] * 3


def test_a_hook_that_calls_the_model_is_told_where_to_call_it(
    planned: list[dict[str, Any]],
) -> None:
    for result in planned:
        assert re.search(
            "embedding is called on parameter .* Call the model in steps", result["hook"][1]
        )
