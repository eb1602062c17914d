"""Hugging Face models train on tensor-parallel stages as they do on a single device."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from tests.processes import ProcessPool
from tests.runtime.huggingface_runs import (
    CONFIGS,
    HuggingFaceCase,
    HuggingFaceOutcome,
    train,
)
from tests.runtime.runs import pipeline, plan_of, stage

pytestmark = pytest.mark.dist

NUM_STEPS = 3
MIXED = plan_of(pipeline(stage([2, 0], 0, 4)), pipeline(stage(1, 0, 4)))
STAGED = plan_of(pipeline(stage([3, 1], 0, 1), stage([0, 2], 1, 3), stage([3, 1], 3, 4)))
WIDER = plan_of(pipeline(stage(2, 0, 1), stage([1, 0], 1, 4)), pipeline(stage(3, 0, 4)))
NARROWER = plan_of(pipeline(stage([2, 0], 0, 2), stage(1, 2, 4)))
PLANS: dict[str, tuple[int, Any]] = {
    "degree 2 beside 1": (3, MIXED),
    "two stages of degree 2": (4, STAGED),
    "degree 1 before 2": (4, WIDER),
}
# Layers of degree 2 beside 1 are in the last plan, too; in the first one so are both ends, which
# differ in what models tie and share.
CASES = [(model, plan) for plan in list(PLANS)[1:] for model in CONFIGS]
CASES += [(model, "degree 2 beside 1") for model in ("llama", "qwen3", "bert")]
# Plans for models whose regions end in what they add: BERT normalises after the addition.
SEQUENCE_PARALLEL = ["llama", "qwen3", "gemma3_text", "gpt_neox", "mixtral", "phi3"]


def assert_same(found: HuggingFaceOutcome, expected: HuggingFaceOutcome, tolerance: float) -> None:
    np.testing.assert_allclose(found.losses, expected.losses, rtol=tolerance)
    assert found.after.keys() == expected.after.keys()
    for name, value in expected.after.items():
        # A bias of BERT's keys has no gradient but rounding: its scale says nothing.
        scale = max(np.abs(value).max(), 1e-3)
        difference = np.abs(found.after[name] - value).max()
        assert difference <= tolerance * scale, f"{name}: {difference:.2e} of {scale:.2e}"


def check(pool: ProcessPool, case: HuggingFaceCase, tolerance: float = 1e-5) -> None:
    case = replace(case, num_rows=NUM_STEPS * case.batch_size * len(case.plan["pipelines"]))
    expected = pool.run_alone(train, case.on_single_device())
    assert len(set(expected.losses)) == len(expected.losses) == NUM_STEPS, (
        "the oracle doesn't train"
    )
    for outcome in pool.run(train, case.world_size, case):
        assert_same(outcome, expected, tolerance)


@pytest.mark.parametrize(("model", "plan"), CASES)
def test_unequal_degrees_train_a_hugging_face_model_as_one_device_does(
    pool: ProcessPool, model: str, plan: str
) -> None:
    world_size, parsed = PLANS[plan]
    inside = plan == "two stages of degree 2"
    check(
        pool,
        HuggingFaceCase(
            model=model,
            plan=parsed,
            world_size=world_size,
            loss="inside" if inside else "outside",
            padded=inside,
        ),
    )


@pytest.mark.parametrize("model", SEQUENCE_PARALLEL)
def test_sequence_parallelism_of_a_hugging_face_model_changes_nothing_but_rounding(
    pool: ProcessPool, model: str
) -> None:
    options = (("sequence_parallel", True),)
    check(pool, HuggingFaceCase(model=model, plan=NARROWER, world_size=3, options=options))


def test_bf16_on_unequal_degrees_stays_near_fp32(pool: ProcessPool) -> None:
    check(
        pool,
        HuggingFaceCase(model="llama", plan=MIXED, world_size=3, precision="bf16-mixed"),
        tolerance=1e-2,
    )
