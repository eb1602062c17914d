"""Losses count as on one device, whatever they are over their batch, or are refused."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fits import Make, Outcome, assert_same, attempt, check, each, fit, refused, warnings_of
from tests.plans import ALONE, COPIES, STAGES
from tests.processes import ProcessPool
from tests.toy import ROWS, Rows, TinyModule

pytestmark = pytest.mark.dist

PLANS = {"stages": STAGES, "copies": COPIES}


def of_each(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each target, of samples in rows."""
    return F.cross_entropy(logits.mT, labels, reduction="none")


class Summed(TinyModule):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return 0.01 * of_each(logits, labels).sum()


class MaskedByHand(TinyModule):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return of_each(logits, labels).sum() / (labels != -100).sum()


class SizesByNumpy(TinyModule):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return of_each(logits, labels).sum() / np.prod(labels.shape)


class Counted(MaskedByHand):
    def num_target_tokens(self, batch: Any) -> Tensor:
        return (batch[1] != -100).sum()


class ByConstant(TinyModule):
    """A sum over a number that isn't the batch's: it is a sum."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return of_each(logits, labels).sum() / 50


class OfSamples(TinyModule):
    """A mean over samples, though these have unequal numbers of targets."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return (of_each(logits, labels).sum(1) / (labels != -100).sum(1).clamp(min=1)).mean()


class OfNextTokens(TinyModule):
    """Its loss shifts the ids itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels = batch
        return of_each(self.model(ids)[:, :-1], labels[:, 1:]).sum() / (labels[:, 1:] != -100).sum()


class CalledALot(TinyModule):
    """Changes much of what it keeps, and must be as if the check had never called it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.register_buffer("calls", torch.zeros(()))
        self.noise = torch.Generator().manual_seed(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kept.append(batch[0][:, 0])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.seen = [len(self.kept), float(torch.cat(self.kept).sum())]


GOOD: list[Make] = [Summed, SizesByNumpy, Counted]
GOOD += [ByConstant, OfSamples, OfNextTokens, CalledALot]


def test_losses_count_as_on_one_device(pool: ProcessPool) -> None:
    check(pool, *each(GOOD, STAGES, COPIES))


class Contrasts(TinyModule):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        samples = logits.mean(1)
        return F.cross_entropy(samples @ samples.T, torch.arange(len(samples)))


class Centres(TinyModule):
    """Its layers get what samples have together."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.model.embed(batch[0])
        x = x - x.mean(0)
        for layer in self.model.layers:
            x = layer(x)
        return self.loss(self.model.head(x), batch[1])


class Dice(TinyModule):
    """Its value would be right, and its gradient not."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        found, wanted = logits.sigmoid(), (labels >= 0)[..., None]
        return 1 - 2 * (found * wanted).sum() / (found.sum() + wanted.sum())


class SumAndMean(Summed):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels) + logits.square().mean()


class TargetsOfItsOwn(TinyModule):
    """A mean over rows that the step chooses: where a half has none, its gradient is a sum's."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels = batch
        is_chosen = (labels != -100).sum(1, keepdim=True) % 2 == 0
        chosen = torch.where(is_chosen, labels, -100)
        return self.loss(self.model(ids), chosen)


class DeclaredWrong(MaskedByHand):
    def num_target_tokens(self, batch: Any) -> int:
        return len(batch[0])


class MixedUp(TinyModule):
    """Mixup: of a micro-batch here, as under DDP of a rank's batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels = batch
        logits, other = self.model(ids), labels[torch.randperm(len(ids))]
        return 0.7 * self.loss(logits, labels) + 0.3 * self.loss(logits, other)


def test_samples_that_meet_are_refused_on_every_rank_unless_that_is_wanted(
    pool: ProcessPool,
) -> None:
    """`results/test_split_check.py` tells many more losses apart."""
    usual: list[Make] = [Contrasts, Centres, Dice, SumAndMean]
    told = dict.fromkeys(usual, "HeteroStrategy(allow_mixing=True)")
    told[TargetsOfItsOwn] = "NaN for a part of a micro-batch"
    told[DeclaredWrong] = "num_target_tokens of the module, as it is declared to be"
    refused(pool, told, STAGES, COPIES)
    wanted = each([Contrasts], STAGES, COPIES, options={"allow_mixing": True})
    for rank in pool.run(attempt, 2, *wanted, *each([MixedUp], STAGES, COPIES)):
        assert [len(found.losses) for found in rank] == [4] * 4


def test_what_is_declared_is_checked(pool: ProcessPool) -> None:
    check(pool, *each([Summed], STAGES, COPIES, options={"loss_reduction": "sum"}))
    wrong = {"loss_reduction": "mean"}
    refused(pool, {Summed: "as it is declared to be"}, STAGES, COPIES, options=wrong)


@pytest.mark.parametrize("make", [Contrasts, Centres, Dice])
def test_a_batch_that_nothing_cuts_needs_no_weights(pool: ProcessPool, make: Make) -> None:
    check(pool, *each([make], ALONE, num_microbatches=1))


class MaskedMean(Counted):
    """A mean by hand: 0 / 0 where no target counts, which cross entropy itself forgives."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        mask = labels != -100
        return (of_each(logits, labels.clamp(min=0)) * mask).sum() / mask.sum()


class GuardedMean(TinyModule):
    """The same, which says 0 where no target counts."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return of_each(logits, labels).sum() / (labels != -100).sum().clamp(min=1)


class HasNothing(TinyModule):
    """Chooses its targets; one micro-batch, which the first check leaves out, has none."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels = batch
        is_last = (ids[0] == HasNothing.last_row).all()
        return self.loss(self.model(ids), torch.where(is_last, -100, labels))

    last_row = Rows(ROWS).ids[-1]


def test_a_loss_that_is_a_mean_over_nothing_where_targets_count_is_told(pool: ProcessPool) -> None:
    told, _ = pool.run(warnings_of, 2, *each([HasNothing], STAGES, num_microbatches=ROWS))
    assert "An iteration's loss is NaN, though its gradients are finite" in told


class RandomlyEmpty(MaskedMean):
    """Leaves out rows at random, all but one of an iteration at most."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels = batch
        drawn = (ids.sum(1) * 37 + 11 * self.current_epoch + 5 * batch_idx) % 10
        is_first = labels[:, -2] != -100
        kept = torch.where(((drawn < 3) | is_first)[:, None], labels, -100)
        self.count = (kept != -100).sum()
        return super().training_step((ids, kept), batch_idx)

    def num_target_tokens(self, batch: Any) -> Tensor:
        return self.count


def is_finite(found: Outcome) -> bool:
    return all(np.isfinite(value).all() for value in found.weights.values())


@pytest.mark.parametrize("plan", PLANS)
def test_micro_batches_without_targets_add_exactly_nothing(pool: ProcessPool, plan: str) -> None:
    # Two rows of four have no targets: the first micro-batches have none at all.
    ((some, *_),) = check(pool, *each([MaskedMean], PLANS[plan], num_empty=2))
    # Without any in an iteration momentum and weight decay go on, and the loss is what it is.
    check(pool, *each([TinyModule, GuardedMean], PLANS[plan], num_empty=ROWS))
    own, like = (each([make], PLANS[plan], num_empty=ROWS)[0] for make in (MaskedMean, TinyModule))
    expected = pool.run_alone(fit, like.on_single_device())
    for found in pool.run(fit, 2, own):
        assert_same(found, expected)
    # In the last of ten epochs the rows are those of the first again.
    ((left_out, *_),) = check(pool, *each([RandomlyEmpty], PLANS[plan], max_epochs=10))
    for known in (left_out, some):
        assert is_finite(known)


class Overflowing(TinyModule):
    """Its second iteration's gradients are infinite, though its loss is finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch[0])
        zeros = 0.0 * logits.sum()
        return self.loss(logits, batch[1]) + (zeros.abs().sqrt() if batch_idx == 1 else zeros)


def test_gradients_that_are_not_finite_are_refused_on_every_rank_or_left_out(
    pool: ProcessPool,
) -> None:
    told = "Gradients of batch 1 in epoch 0 aren't finite … ranks [0, 1] made them"
    refused(pool, {Overflowing: told}, STAGES)
    skips = each([Overflowing], STAGES, COPIES, options={"nonfinite_gradients": "skip"})
    for rank in pool.run(attempt, 2, *skips):
        for found in rank:
            assert is_finite(found)
            assert len(found.losses) == 4
