"""Packed, pretrained and drawn models train under any plan as on one device."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.core.errors import CheckpointError, ModelError
from lightning_hetero.models.huggingface import export_pretrained
from tests.fits import Outcome, assert_same, check, check_refused, outcome_of, train
from tests.plans import pipeline, plan_of, stage
from tests.processes import ProcessPool
from tests.runtime.huggingface_runs import HuggingFaceCase, auto_class, make_model
from tests.toy import quiet

pytestmark = pytest.mark.dist

ALONE = plan_of(pipeline(stage(0, 0, 4)))
STAGED = plan_of(pipeline(stage(2, 0, 1), stage(0, 1, 4)), pipeline(stage(1, 0, 4)))
# A pipeline of tensor-parallel degree 2 beside one of two stages.
MIXED = plan_of(pipeline(stage([1, 0], 0, 4)), pipeline(stage(2, 0, 3), stage(3, 3, 4)))


@dataclass(kw_only=True)
class Kept:
    """What a rank knows, and what it has read."""

    outcome: Outcome
    before: dict[str, np.ndarray]
    """Rank 0's checkpoint before the first step."""
    num_bytes_read: int


class Initial(L.Callback):
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        state = trainer.strategy.lightning_module_state_dict()
        self.weights = {name: value.detach().numpy().copy() for name, value in state.items()}


def fit(rank: int, case: HuggingFaceCase) -> Kept:
    """Train a case on one of its ranks; with a folder, also save what came out beside it."""
    module = train(case, initial := Initial())
    if case.folder is not None and case.plan is not None:
        module.trainer.save_checkpoint(Path(case.folder).parent / "trained.ckpt")
        if rank == 0:
            module.model.save_pretrained(Path(case.folder).parent / "trained")
    source = getattr(module.model, "weight_source", None)
    num_bytes_read = 0 if source is None else source.num_bytes_read
    outcome = outcome_of(module)
    return Kept(outcome=outcome, before=initial.weights, num_bytes_read=num_bytes_read)


def packed_case(model: str, plan: Any, **more: Any) -> HuggingFaceCase:
    return HuggingFaceCase(model=model, plan=plan, packed=True, **more)


@pytest.mark.parametrize(
    ("model", "sequence_parallel"), [("llama", True), ("gemma3_text", False), ("bert", False)]
)
def test_packed_batches_train_under_a_mixed_plan_as_on_one_device(
    pool: ProcessPool, model: str, *, sequence_parallel: bool
) -> None:
    check(pool, packed_case(model, MIXED, options={"sequence_parallel": sequence_parallel}))


def test_a_model_on_the_meta_device_trains_alike_under_three_plans(pool: ProcessPool) -> None:
    alone, staged, mixed = (
        pool.run(fit, size, packed_case("gpt2", plan, source="meta", batch_size=batch_size))
        for plan, size, batch_size in ((ALONE, 1, 8), (STAGED, 3, 4), (MIXED, 4, 4))
    )
    for outcomes in (staged, mixed):
        assert outcomes[0].before.keys() == alone[0].before.keys()
        for name, value in alone[0].before.items():
            assert np.array_equal(outcomes[0].before[name], value), name
        assert_same(outcomes[0].outcome, alone[0].outcome)


def test_a_folder_is_read_by_slices_trained_and_written_again(
    pool: ProcessPool, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    torch.manual_seed(6)
    model = make_model("mixtral")
    model.save_pretrained(folder, max_shard_size="9KB")
    case = packed_case("mixtral", MIXED, folder=folder)
    expected = pool.run_alone(fit, case.on_single_device())
    outcomes = pool.run(fit, 4, case)
    for outcome in outcomes:
        assert_same(outcome.outcome, expected.outcome)
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
            assert np.array_equal(value.numpy(), outcomes[0].outcome.weights[f"model.{name}"]), name


def test_a_failure_before_there_are_weights_is_the_error_that_is_seen() -> None:
    module = packed_case("llama", ALONE, source="meta").module()
    module.register_buffer("angles", torch.zeros(3, device="meta"))
    strategy = HeteroStrategy(ParallelPlan.from_dict(ALONE))
    with pytest.raises(ModelError, match="Buffer angles is on the meta device"):
        L.Trainer(**quiet(max_epochs=1), strategy=strategy, devices=1).fit(module, DataLoader([]))


class Unlike(HuggingFaceCase):
    """Rank 1 builds its module on the meta device and rank 0 on CPU."""

    def module(self) -> Any:
        source = "meta" if os.environ["RANK"] == "1" else "cpu"
        return packed_case("llama", self.plan, source=source).module()


def test_ranks_that_build_the_module_differently_all_say_so(pool: ProcessPool) -> None:
    plan = plan_of(pipeline(stage(0, 0, 4)), pipeline(stage(1, 0, 4)))
    told = "by rank: {0: 0, 1: 39}", "Build the module alike"
    check_refused(pool, Unlike(model="llama", plan=plan, packed=True), *told)
