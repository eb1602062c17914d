"""Hugging Face models train under any plan as they do on a single device."""

from typing import Any

import numpy as np
import pytest

from tests.processes import ProcessPool
from tests.runtime.huggingface_runs import (
    CONFIGS,
    UNPLANNED_CONFIGS,
    HuggingFaceCase,
    HuggingFaceOutcome,
    train,
)
from tests.runtime.runs import pipeline, plan_of, stage

pytestmark = pytest.mark.dist

TOLERANCE = 1e-5

TWO_AND_ONE = plan_of(pipeline(stage(0, 0, 1), stage(2, 1, 4)), pipeline(stage(1, 0, 4)))
THREE = plan_of(pipeline(stage(1, 0, 1), stage(0, 1, 2), stage(2, 2, 3), stage(1, 3, 4)))
PLANS: dict[str, Any] = {"two stages beside one": TWO_AND_ONE, "three stages": THREE}


def assert_same(found: HuggingFaceOutcome, expected: HuggingFaceOutcome, tolerance: float) -> None:
    np.testing.assert_allclose(found.losses, expected.losses, rtol=tolerance)
    assert found.after.keys() == expected.after.keys()
    for name, value in expected.after.items():
        # A key's bias has no gradient but rounding: what is left of it is nothing beside the
        # weights, whose initial deviation is 0.02.
        scale = max(np.abs(value).max(), 1e-3)
        difference = np.abs(found.after[name] - value).max()
        assert difference <= tolerance * scale, f"{name}: {difference:.2e} of {scale:.2e}"


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", [*CONFIGS, *UNPLANNED_CONFIGS])
def test_a_plan_trains_a_hugging_face_model_as_one_device_does(
    pool: ProcessPool, model: str, plan: str
) -> None:
    inside = plan == "three stages"
    case = HuggingFaceCase(
        model=model,
        plan=PLANS[plan],
        world_size=3,
        loss="inside" if inside else "outside",
        padded=inside,
        num_rows=12 if inside else 24,  # Three iterations.
    )
    expected = pool.run_alone(train, case.on_single_device())
    assert len(set(expected.losses)) == len(expected.losses) > 2, "the oracle doesn't train"
    for outcome in pool.run(train, 3, case):
        assert_same(outcome, expected, TOLERANCE)
