"""Layers that older checkpoints run in parts train as on one device, or are refused."""

from dataclasses import replace

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fits import SEED, Case, Outcome, assert_same, outcome_of, train
from tests.plans import pipeline, plan_of, stage
from tests.processes import ProcessFailed, ProcessPool
from tests.runtime.case_modules import RowsModule

pytestmark = pytest.mark.dist


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
    return outcome_of(train(case, module=module))


CASE = Case(
    plan=plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(1, 0, 3))),
    world_size=2,
    batch_size=4,
    num_rows=16,
    optimizer="sgd",
    clip_val=0.1,
)


def test_gradients_that_older_checkpoints_make_in_parts_are_whole_or_refused(
    pool: ProcessPool,
) -> None:
    # Blocks so small that they travel together are sent after the last part.
    for whose in ("the model's", "each block's"):
        expected = pool.run(train_sharing, 1, CASE.on_single_device(), whose)[0]
        for outcome in pool.run(train_sharing, 2, CASE, whose):
            assert_same(outcome, expected)
    with pytest.raises(ProcessFailed, match="comes in several parts"):
        pool.run(train_sharing, 2, replace(CASE, width=64), "each block's")
