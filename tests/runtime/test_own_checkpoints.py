"""A model that checkpoints its own layers, or changes their input in place, trains as it should."""

from dataclasses import replace

import numpy as np
import pytest

from tests.processes import ProcessFailed, ProcessPool
from tests.runtime.checkpoint_runs import (
    refused_checkpoints,
    train_checkpointed,
    train_checkpointed_llama,
    train_in_place,
    train_sharing,
)
from tests.runtime.huggingface_runs import HuggingFaceCase
from tests.runtime.runs import Case, Outcome, pipeline, plan_of, stage
from tests.runtime.test_huggingface_parity import assert_same
from tests.runtime.test_parity import assert_same_training

pytestmark = pytest.mark.dist

CASE = Case(
    plan=plan_of(
        pipeline(stage(2, 0, 1), stage(0, 1, 2), stage(2, 2, 3), num_microbatches=3),
        pipeline(stage(1, 0, 3), num_microbatches=1),
    ),
    world_size=3,
    batch_size=4,
    num_rows=16,
)
ONE_STAGE = replace(
    CASE, plan=plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(1, 0, 3))), world_size=2
)


def assert_equal(found: Outcome, expected: Outcome) -> None:
    assert found.losses == expected.losses
    for name, weight in expected.weights.items():
        assert np.array_equal(found.weights[name], weight), name


@pytest.mark.parametrize("options", [(), (("activation_checkpointing", 2),)])
def test_own_checkpoints_change_no_bit_of_training(
    pool: ProcessPool, options: tuple[tuple[str, object], ...]
) -> None:
    case = replace(CASE, options=options)
    for outcomes in pool.run(train_checkpointed, 3, case, ("none", "layers", "pairs", "model")):
        for outcome in outcomes.values():
            assert_equal(outcome, outcomes["none"])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_own_checkpoints_change_nothing_under_tensor_parallelism(
    pool: ProcessPool, *, sequence_parallel: bool
) -> None:
    case = HuggingFaceCase(
        model="llama",
        plan=plan_of(pipeline(stage([0, 1], 0, 1), stage([2, 3], 1, 4))),
        world_size=4,
        num_rows=8,
        config=(("attention_dropout", 0.3),),
        options=(("sequence_parallel", sequence_parallel),),
    )
    for plain, checkpointed in pool.run(train_checkpointed_llama, 4, case):
        assert_same(checkpointed, plain, 1e-6)


def test_older_checkpoints_change_no_bit_of_plans_with_one_stage(pool: ProcessPool) -> None:
    for outcomes in pool.run(train_checkpointed, 2, ONE_STAGE, ("none", "layers", "reentrant")):
        for outcome in outcomes.values():
            assert_equal(outcome, outcomes["none"])


def test_older_checkpoints_are_refused_in_stages_by_name(pool: ProcessPool) -> None:
    for refusal in pool.run(refused_checkpoints, 3, CASE):
        assert "use_reentrant=False" in refusal


def test_layers_may_change_their_input_in_place(pool: ProcessPool) -> None:
    case = replace(CASE, optimizer="sgd", num_rows=32)
    expected = pool.run(train_in_place, 1, case.on_single_device())[0]
    for outcome in pool.run(train_in_place, 3, case):
        assert_same_training(outcome, expected)


def test_gradients_that_older_checkpoints_make_in_parts_are_whole_or_refused(
    pool: ProcessPool,
) -> None:
    case = replace(ONE_STAGE, optimizer="sgd", clip_val=0.1)
    expected = pool.run(train_sharing, 1, case.on_single_device(), "the model's")[0]
    for outcome in pool.run(train_sharing, 2, case, "the model's"):
        assert_same_training(outcome, expected)
    # Blocks so small that they travel together are sent after the last part.
    expected = pool.run(train_sharing, 1, case.on_single_device(), "each block's")[0]
    for outcome in pool.run(train_sharing, 2, case, "each block's"):
        assert_same_training(outcome, expected)
    with pytest.raises(ProcessFailed, match="comes in several parts"):
        pool.run(train_sharing, 2, replace(case, width=64), "each block's")
