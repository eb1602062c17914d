"""A model that checkpoints its own layers trains as it should."""

from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.processes import ProcessFailed, ProcessPool
from tests.runtime.runs import (
    SEED,
    Case,
    MaskingModule,
    Outcome,
    RowsModule,
    assert_same_bits,
    assert_same_training,
    fit,
    pipeline,
    plan_of,
    stage,
)
from tests.toy import GPT

pytestmark = pytest.mark.dist


class CheckpointedGPT(GPT):
    """Computes its activations again in backward, in parts that a user may choose."""

    how = "layers"

    def forward(self, ids: Tensor) -> Tensor:
        if self.how == "model":
            out: Tensor = checkpoint(super().forward, ids, use_reentrant=False)
            return out
        x = self.wte(ids) + self.wpe[: ids.shape[1]]
        length = 2 if self.how == "pairs" else 1
        for first in range(0, len(self.blocks), length):
            part = nn.Sequential(*self.blocks[first : first + length])
            x = checkpoint(part, x, use_reentrant=self.how == "reentrant")
        head: Tensor = self.head(self.ln_f(x))
        return head


class CheckpointedModule(MaskingModule):
    """Draws random numbers everywhere, and checkpoints as it is told; "none" leaves it out."""

    def __init__(self, case: Case, how: str) -> None:
        super().__init__(case)
        if how != "none":
            self.model.__class__ = CheckpointedGPT
            self.model.how = how


class SharingBlock(nn.Module):
    """Computes the same in two older checkpoints, so that a gradient comes in two parts."""

    def __init__(self, linear: nn.Linear, *, owns: bool) -> None:
        super().__init__()
        self.own = linear if owns else nn.Linear(linear.in_features, linear.out_features)
        self.used = [linear]

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + torch.tanh(checkpoint(self.used[0].forward, self.own(x), use_reentrant=True))
        return x


def train_sharing(rank: int, case: Case, whose: str) -> Outcome:
    """Train blocks whose parameters get their gradients in parts."""
    L.seed_everything(SEED, verbose=False)
    module = RowsModule(case)
    width, owns = case.width, whose == "each block's"
    module.model.shared = nn.Linear(width, width)
    for index in range(case.num_layers):
        linear = nn.Linear(width, width) if owns else module.model.shared
        module.model.blocks[index] = SharingBlock(linear, owns=owns)
    return fit(module, case)


def train_checkpointed(rank: int, case: Case, hows: tuple[str, ...]) -> dict[str, Outcome]:
    """Train a case once for each way of checkpointing."""
    outcomes = {}
    for how in hows:
        L.seed_everything(SEED, verbose=False)
        outcomes[how] = fit(CheckpointedModule(case, how), case)
    return outcomes


CASE = Case(
    plan=plan_of(
        pipeline(stage(2, 0, 1), stage(0, 1, 2), stage(2, 2, 3), num_microbatches=3),
        pipeline(stage(1, 0, 3), num_microbatches=1),
    ),
    world_size=3,
    batch_size=4,
    num_rows=16,
)
TWO_LAYERS = plan_of(
    pipeline(stage(2, 0, 1), stage(0, 1, 3), num_microbatches=3), *CASE.plan["pipelines"][1:]
)
ONE_STAGE = replace(
    CASE, plan=plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(1, 0, 3))), world_size=2
)


@pytest.mark.parametrize(
    ("plan", "options"), [(CASE.plan, ()), (TWO_LAYERS, (("activation_checkpointing", 2),))]
)
def test_own_checkpoints_change_no_bit_of_training(
    pool: ProcessPool, plan: Any, options: tuple[tuple[str, object], ...]
) -> None:
    case = replace(CASE, plan=plan, options=options)
    for outcomes in pool.run(train_checkpointed, 3, case, ("none", "layers", "pairs", "model")):
        for outcome in outcomes.values():
            assert_same_bits([outcome], [outcomes["none"]])


def test_older_checkpoints_change_no_bit_of_plans_with_one_stage(pool: ProcessPool) -> None:
    for outcomes in pool.run(train_checkpointed, 2, ONE_STAGE, ("none", "layers", "reentrant")):
        for outcome in outcomes.values():
            assert_same_bits([outcome], [outcomes["none"]])


def test_older_checkpoints_are_refused_in_stages_by_name(pool: ProcessPool) -> None:
    with pytest.raises(ProcessFailed) as failed:
        pool.run(train_checkpointed, 3, CASE, ("reentrant",))
    assert len(failed.value.failures) == 3
    assert all("use_reentrant=False" in text for text in failed.value.failures.values())


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
