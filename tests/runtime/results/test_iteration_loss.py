"""Micro-batches without targets add nothing, and what isn't finite is never stepped on."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_hetero.runtime.results.iteration_loss import has_nonfinite
from tests.processes import ProcessFailed, ProcessPool
from tests.runtime.step_cases import COPIES, PLANS, ROWS, STAGES, TinyModule, fit, same


class MaskedMean(TinyModule):
    """A mean by hand: 0 / 0 where no target counts, which cross entropy itself forgives."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        mask = (labels != -100).flatten()
        each = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten().clamp(min=0), reduction="none"
        )
        return (each * mask).sum() / mask.sum()

    def num_target_tokens(self, batch: Any) -> Tensor:
        return (batch[1] != -100).sum()


class GuardedMean(TinyModule):
    """The same, which says 0 where no target counts."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        mask = (labels != -100).flatten()
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return each.sum() / mask.sum().clamp(min=1)


class Overflowing(TinyModule):
    """Its second iteration's gradients are infinite, though its loss is finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch[0])
        zeros = 0.0 * logits.sum()
        return self.loss(logits, batch[1]) + (zeros.abs().sqrt() if batch_idx == 1 else zeros)


@pytest.mark.dist
@pytest.mark.parametrize("plan", PLANS)
def test_a_microbatch_without_targets_adds_exactly_nothing(pool: ProcessPool, plan: str) -> None:
    # Two rows of four have no targets: the first micro-batches have none at all.
    expected = pool.run(fit, 1, MaskedMean, None, 2)[0]
    assert all(np.isfinite(value).all() for value in expected["weights"].values())
    for found in pool.run(fit, 2, MaskedMean, PLANS[plan], 2):
        same(found, expected)


@pytest.mark.dist
@pytest.mark.parametrize("plan", PLANS)
def test_an_iteration_without_any_target_has_gradients_of_zero(
    pool: ProcessPool, plan: str
) -> None:
    # Momentum and weight decay go on, and the loss is what the step makes of no targets.
    for make, loss in ((TinyModule, np.nan), (MaskedMean, np.nan), (GuardedMean, 0.0)):
        oracle = TinyModule if make is MaskedMean else make
        expected = pool.run(fit, 1, oracle, None, ROWS)[0]
        np.testing.assert_equal(expected["losses"], np.full(4, loss))
        for found in pool.run(fit, 2, make, PLANS[plan], ROWS):
            same(found, expected)


class RandomlyEmpty(MaskedMean):
    """Leaves out rows at random, all but one of an iteration at most."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels = batch
        labels = self.left(ids, labels, batch_idx)
        return super().training_step((ids, labels), batch_idx)

    def left(self, ids: Tensor, labels: Tensor, batch_idx: int) -> Tensor:
        drawn = (ids.sum(1) * 37 + 11 * self.current_epoch + 5 * batch_idx) % 10
        is_first = labels[:, -2] != -100
        kept = torch.where(((drawn < 3) | is_first)[:, None], labels, -100)
        self.count = (kept != -100).sum()
        return kept

    def num_target_tokens(self, batch: Any) -> Tensor:
        return self.count


@pytest.mark.dist
@pytest.mark.parametrize("plan", PLANS)
def test_iterations_with_targets_left_out_at_random_stay_those_of_one_device(
    pool: ProcessPool, plan: str
) -> None:
    epochs = 10  # Then the same rows are left out again.
    expected = pool.run(fit, 1, RandomlyEmpty, None, 0, None, epochs)[0]
    for found in pool.run(fit, 2, RandomlyEmpty, PLANS[plan], 0, None, epochs):
        assert all(np.isfinite(value).all() for value in found["weights"].values())
        same(found, expected)


@pytest.mark.dist
def test_gradients_that_are_not_finite_end_the_run_on_every_rank_naming_where(
    pool: ProcessPool,
) -> None:
    with pytest.raises(ProcessFailed) as caught:
        pool.run(fit, 2, Overflowing, STAGES)
    assert len(caught.value.failures) == 2
    for text in caught.value.failures.values():
        assert "Gradients of batch 1 in epoch 0 aren't finite" in text
        assert "ranks [0, 1] made them" in text


@pytest.mark.dist
@pytest.mark.parametrize("plan", [STAGES, COPIES])
def test_an_iteration_with_gradients_that_are_not_finite_can_be_left_out(
    pool: ProcessPool, plan: Any
) -> None:
    for found in pool.run(fit, 2, Overflowing, plan, 0, {"nonfinite_gradients": "skip"}):
        assert all(np.isfinite(value).all() for value in found["weights"].values())
        assert len(found["losses"]) == 4


def test_one_number_that_is_not_finite_among_many_is_seen() -> None:
    tensors = [torch.ones(3), torch.ones(2, 2, dtype=torch.bfloat16)]
    device = torch.device("cpu")
    assert float(has_nonfinite(tensors, device)) == 0
    assert float(has_nonfinite([], device)) == 0
    for value in (float("nan"), float("inf"), -float("inf")):
        tensors[1][1, 0] = value
        assert float(has_nonfinite(tensors, device)) != 0
