"""Losses and logged numbers are what one device has, whatever they are over their batch."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.processes import ProcessPool
from tests.runtime.runs import pipeline, plan_of, stage
from tests.runtime.step_cases import PLANS, TinyModule, fit_each, same

pytestmark = pytest.mark.dist


class Summed(TinyModule):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return 0.01 * F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class MaskedByHand(TinyModule):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return each.sum() / (labels != -100).sum()


class MaskCountedBefore(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels = batch
        count = (labels != -100).sum().clamp(min=1)
        each = F.cross_entropy(self.model(ids).flatten(0, 1), labels.flatten(), reduction="none")
        return each.sum() / count


class SizesByNumpy(TinyModule):
    """Divides a sum by a shape's product, and logs sizes that numpy counts."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(logits.mT, labels, reduction="none")
        return each.sum() / np.prod(labels.shape)


class ScaledByNumpy(TinyModule):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels) * float(np.prod(labels.shape))


class Counted(MaskedByHand):
    def num_target_tokens(self, batch: Any) -> Tensor:
        return (batch[1] != -100).sum()


class TwoLosses(TinyModule):
    """Means over targets that count and over all elements."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels) + logits.square().mean()


class SumAndMean(Summed):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels) + logits.square().mean()


class Contrasts(TinyModule):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        samples = logits.mean(1)
        return F.cross_entropy(samples @ samples.T, torch.arange(len(samples)))


class Centres(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids, labels = batch
        x = self.model.embed(ids)
        x = x - x.mean(0)
        for layer in self.model.layers:
            x = layer(x)
        return self.loss(self.model.head(x), labels)


class PairsByHand(TinyModule):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        samples = logits.mean(1)
        return super().loss(logits, labels) + (samples[::2] - samples[1::2]).square().mean()


class HardestByOrder(TinyModule):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        hardest = each.argsort(descending=True)[: len(each) // 4]
        return each[hardest].mean()


class LaterOnesMore(TinyModule):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(logits.mT, labels, reduction="none").mean(1)
        return (torch.arange(1.0, len(each) + 1) * each).mean()


class Dice(TinyModule):
    """Its value would be right, and its gradient not."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        found, wanted = logits.sigmoid(), (labels >= 0)[..., None]
        return 1 - 2 * (found * wanted).sum() / (found.sum() + wanted.sum())


def groups_of(labels: Tensor, number: int) -> list[Tensor]:
    """Return a mask for each group of samples; the first four are in groups 1, 0, 2 and 1 of 3."""
    return [(labels != -100).sum(1) % number == group for group in range(number)]


class AsksOfGroups(TinyModule):
    """Looks at groups whose samples its loss doesn't choose."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        for group, mask in enumerate(groups_of(labels, 3)):
            if mask.any():
                self.log(f"size {group}", logits[mask].square().mean())
        return super().loss(logits, labels)


class ByConstant(TinyModule):
    """A sum over a number that isn't the batch's: it is a sum."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return each.sum() / 50


class OfSamples(TinyModule):
    """A mean over samples, though these have unequal numbers of targets."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(logits.mT, labels, reduction="none")
        return (each.sum(1) / (labels != -100).sum(1).clamp(min=1)).mean()


class OfNextTokens(TinyModule):
    """Its loss shifts the ids itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels = batch
        logits, wanted = self.model(ids)[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


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


class MixedUp(TinyModule):
    """Mixup: of a micro-batch here, as under DDP of a rank's batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels = batch
        logits, other = self.model(ids), labels[torch.randperm(len(ids))]
        return 0.7 * self.loss(logits, labels) + 0.3 * self.loss(logits, other)


class DeclaredWrong(MaskedByHand):
    def num_target_tokens(self, batch: Any) -> int:
        return len(batch[0])


ONE = plan_of(pipeline(stage(0, 0, 3)))
GOOD = [Summed, MaskedByHand, MaskCountedBefore, Counted, SizesByNumpy]
GOOD += [ByConstant, OfSamples, OfNextTokens, CalledALot]


@pytest.mark.parametrize("plan", PLANS)
def test_losses_count_as_on_one_device(pool: ProcessPool, plan: str) -> None:
    expected = pool.run(fit_each, 1, GOOD, None)[0]
    for rank in pool.run(fit_each, 2, GOOD, PLANS[plan]):
        for make, found, alone in zip(GOOD, rank, expected, strict=True):
            assert isinstance(found, dict), (make, found)
            same(found, alone)
            assert found["seen"] == alone["seen"], make


def test_what_is_declared_is_checked(pool: ProcessPool) -> None:
    expected = pool.run(fit_each, 1, [Summed], None)[0]
    for plan in PLANS.values():
        for rank in pool.run(fit_each, 2, [Summed], plan, {"loss_reduction": "sum"}):
            same(rank[0], expected[0])
        for (told,) in pool.run(fit_each, 2, [Summed], plan, {"loss_reduction": "mean"}):
            assert "as it is declared to be" in told
        for (told,) in pool.run(fit_each, 2, [DeclaredWrong], plan):
            assert "num_target_tokens of the module, as it is declared to be" in told


def test_samples_that_meet_are_refused_on_every_rank_unless_that_is_wanted(
    pool: ProcessPool,
) -> None:
    usual = [Contrasts, Centres, PairsByHand, HardestByOrder, LaterOnesMore, Dice]
    usual += [TwoLosses, SumAndMean, ScaledByNumpy]
    for plan in PLANS.values():
        for messages in pool.run(fit_each, 2, usual, plan):
            for make, told in zip(usual, messages, strict=True):
                assert "HeteroStrategy(allow_mixing=True)" in str(told), make
        for (found,) in pool.run(fit_each, 2, [Contrasts], plan, {"allow_mixing": True}):
            assert len(found["losses"]) == 4
    alone, found = (
        fit_each(0, [Centres], plan, {"num_microbatches": 1})[0] for plan in (None, ONE)
    )
    same(found, alone)


def test_what_is_drawn_at_random_is_mixed_inside_micro_batches(pool: ProcessPool) -> None:
    for plan in PLANS.values():
        for (found,) in pool.run(fit_each, 2, [MixedUp], plan):
            assert len(found["losses"]) == 4


def test_a_batch_that_nothing_cuts_needs_no_weights() -> None:
    makes, options = [Contrasts, Dice], {"num_microbatches": 1}
    alone, found = (fit_each(0, makes, plan, options) for plan in (None, ONE))
    for one, other in zip(found, alone, strict=True):
        same(one, other)
