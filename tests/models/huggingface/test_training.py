"""Packed, pretrained and drawn models train under any plan as on one device."""

import re
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.core.errors import CheckpointError, ModelError
from lightning_hetero.models.huggingface import export_pretrained
from tests.models.huggingface.runs import (
    PackedCase,
    PackedModule,
    PackedOutcome,
    train,
    train_unlike,
)
from tests.processes import ProcessFailed, ProcessPool
from tests.runtime.huggingface_runs import auto_class, make_model
from tests.runtime.runs import pipeline, plan_of, stage
from tests.toy import quiet

pytestmark = pytest.mark.dist

ALONE = plan_of(pipeline(stage(0, 0, 4)))
STAGED = plan_of(pipeline(stage(2, 0, 1), stage(0, 1, 4)), pipeline(stage(1, 0, 4)))
# A pipeline of tensor-parallel degree 2 beside one of two stages.
MIXED = plan_of(pipeline(stage([1, 0], 0, 4)), pipeline(stage(2, 0, 3), stage(3, 3, 4)))


def assert_same(found: PackedOutcome, expected: PackedOutcome, tolerance: float = 1e-5) -> None:
    assert len(set(expected.losses)) == len(expected.losses) > 2, "the oracle doesn't train"
    np.testing.assert_allclose(found.losses, expected.losses, rtol=tolerance)
    assert found.after.keys() == expected.after.keys()
    for name, value in expected.after.items():
        # A bias of BERT's keys has no gradient but rounding: its scale says nothing.
        scale = max(float(np.abs(value).max()), 1e-3)
        assert float(np.abs(found.after[name] - value).max()) <= tolerance * scale, name


@pytest.mark.parametrize(
    ("model", "sequence_parallel"), [("llama", True), ("gemma3_text", False), ("bert", False)]
)
def test_packed_batches_train_under_a_mixed_plan_as_on_one_device(
    pool: ProcessPool, model: str, *, sequence_parallel: bool
) -> None:
    case = PackedCase(model=model, plan=MIXED, world_size=4, sequence_parallel=sequence_parallel)
    expected = pool.run_alone(train, case.on_single_device())
    for outcome in pool.run(train, 4, case):
        assert_same(outcome, expected)


def test_a_model_on_the_meta_device_trains_alike_under_three_plans(pool: ProcessPool) -> None:
    alone, staged, mixed = (
        pool.run(
            train,
            size,
            PackedCase(
                model="gpt2", source="meta", plan=plan, world_size=size, batch_size=batch_size
            ),
        )
        for plan, size, batch_size in ((ALONE, 1, 8), (STAGED, 3, 4), (MIXED, 4, 4))
    )
    for outcomes in (staged, mixed):
        assert outcomes[0].initial.keys() == alone[0].initial.keys()
        for name, value in alone[0].initial.items():
            assert np.array_equal(outcomes[0].initial[name], value), name
        assert_same(outcomes[0], alone[0])


def test_a_folder_is_read_by_slices_trained_and_written_again(
    pool: ProcessPool, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    torch.manual_seed(6)
    model = make_model("mixtral")
    model.save_pretrained(folder, max_shard_size="9KB")
    case = PackedCase(model="mixtral", plan=MIXED, world_size=4, source="folder", folder=folder)
    expected = pool.run_alone(train, case.on_single_device())
    outcomes = pool.run(train, 4, case)
    for outcome in outcomes:
        assert_same(outcome, expected)
    read = [outcome.num_bytes_read for outcome in outcomes]
    total = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    assert sum(read) == total
    assert max(read) < total / 2

    with torch.device("meta"):
        empty = make_model("mixtral")
    export_pretrained(tmp_path / "trained.ckpt", empty, tmp_path / "export", max_shard_size="9KB")
    assert len(list((tmp_path / "export").glob("*.safetensors"))) > 2
    with pytest.raises(CheckpointError, match=r"holds 0 modules .* LlamaForCausalLM .*'model'"):
        export_pretrained(tmp_path / "trained.ckpt", make_model("llama"), tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"Can't read .*config\.json"):
        export_pretrained(folder / "config.json", empty, tmp_path / "none")
    for written in ("trained", "export"):
        again = auto_class("mixtral").from_pretrained(tmp_path / written)
        for name, value in again.state_dict().items():
            assert np.array_equal(value.numpy(), outcomes[0].after[f"model.{name}"]), name


def test_a_failure_before_there_are_weights_is_the_error_that_is_seen() -> None:
    case = PackedCase(model="llama", source="meta", plan=ALONE)
    module = PackedModule(case)
    module.register_buffer("angles", torch.zeros(3, device="meta"))
    strategy = HeteroStrategy(ParallelPlan.from_dict(ALONE))
    with pytest.raises(ModelError, match="Buffer angles is on the meta device"):
        L.Trainer(**quiet(max_epochs=1), strategy=strategy, devices=1).fit(module)


def test_ranks_that_build_the_module_differently_all_say_so(pool: ProcessPool) -> None:
    plan = plan_of(pipeline(stage(0, 0, 4)), pipeline(stage(1, 0, 4)))
    with pytest.raises(ProcessFailed) as failed:
        pool.run(train_unlike, 2, PackedCase(model="llama", plan=plan, world_size=2))
    assert len(failed.value.failures) == 2
    for text in failed.value.failures.values():
        assert re.search(r"by rank: \{0: 0, 1: 39\}.*Build the module alike", text)
