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


class NumbersOfChosen(TinyModule):
    """Divides by numbers of targets that Python has, and logs the same."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        mask = labels != -100
        each = F.cross_entropy(logits[mask], labels[mask], reduction="none")
        self.log("by item", each.sum() / mask.sum().item())
        self.log("by int", each.square().sum() / max(int(mask.sum()), 1))
        return each.sum() / len(each)


class MaskCountedBefore(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels = batch
        count = (labels != -100).sum().clamp(min=1)
        each = F.cross_entropy(self.model(ids).flatten(0, 1), labels.flatten(), reduction="none")
        return each.sum() / count


class Opaque(MaskedByHand):
    """No rule covers the logarithm of an exponential."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels).exp().log()


class OpaqueSum(Summed):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels).exp().log()


class SizesByNumpy(TinyModule):
    """Divides a sum by a shape's product, and logs sizes that numpy counts."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(logits.mT, labels, reduction="none")
        self.log("tokens", float(np.prod(labels.shape)))
        self.log("rows", float(np.array(labels.shape)[0]))
        return each.sum() / np.prod(labels.shape)


class ScaledByNumpy(TinyModule):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels) * float(np.prod(labels.shape))


class ScaledByArray(TinyModule):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels) / np.array(labels.shape)[0]


class LogsTheFirst(TinyModule):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.log("first", logits[0].sum())
        self.log("some", logits[:1].square().sum().item())
        return super().loss(logits, labels)


class Counted(Opaque):
    def num_target_tokens(self, batch: Any) -> Tensor:
        return (batch[1] != -100).sum()


class TwoLosses(TinyModule):
    """Means over targets that count and over all elements."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels) + logits.square().mean()


class SumAndMean(Summed):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels) + logits.square().mean()


class Logging(TinyModule):
    validates = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count = (batch[1] != -100).sum()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ids, labels = batch
        logits = self.model(ids)
        loss = self.loss(logits, labels)
        options = {"on_step": False, "on_epoch": True}
        self.log("loss", loss)
        self.log("number", loss.item())
        self.log("summed", 0.1 * loss, reduce_fx="sum")
        self.log("worst", loss, reduce_fx="max", **options)
        self.log("accuracy", (logits.argmax(-1) == labels).float().mean())
        self.log("size", logits.square().mean())
        self.log("targets", (labels != -100).sum().float())
        self.log("largest", logits.max(), reduce_fx="max", **options)
        self.log("highest", logits.max())


class Contrasts(TinyModule):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        samples = logits.mean(1)
        return F.cross_entropy(samples @ samples.T, torch.arange(len(samples)))


class MixesRows(TinyModule):
    """Mixes each sample with another one of the batch, before the layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids, labels = batch
        x = self.model.embed(ids)
        x = 0.7 * x + 0.3 * x[torch.randperm(len(x))]
        for layer in self.model.layers:
            x = layer(x)
        return self.loss(self.model.head(x), labels)


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


class WeighsByPlacesMadeBefore(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids, labels = batch
        weights = torch.arange(1.0, len(ids) + 1)
        each = F.cross_entropy(self.model(ids).mT, labels, reduction="none").mean(1)
        return (weights * each).mean()


class Dice(TinyModule):
    """Its value would be right, and its gradient not."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        found, wanted = logits.sigmoid(), (labels >= 0)[..., None]
        return 1 - 2 * (found * wanted).sum() / (found.sum() + wanted.sum())


def groups_of(labels: Tensor, number: int) -> list[Tensor]:
    """Return a mask for each group of samples; the first four are in groups 1, 0, 2 and 1 of 3."""
    return [(labels != -100).sum(1) % number == group for group in range(number)]


class ByGroup(TinyModule):
    """A mean over each group that is there, so that each counts alike."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        total: Any = 0.0
        for mask in groups_of(labels, 3):
            if mask.any():
                total = total + F.cross_entropy(logits[mask, 0], labels[mask, 0])
        return total


class ByGroupIfCounted(TinyModule):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses = []
        for mask in groups_of(labels, 3):
            if mask.sum() > 0:
                losses.append(F.cross_entropy(logits[mask, 0], labels[mask, 0]))
        return sum(losses, torch.zeros(()))


class SumsByGroup(TinyModule):
    """The same with means by hand; of one sample or all of them a group may be the micro-batch."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        total: Any = 0.0
        for mask in groups_of(labels, 3):
            if mask.any():
                each = F.cross_entropy(logits[mask, 0], labels[mask, 0], reduction="none")
                total = total + each.sum() / mask.sum()
        return total


class SharesThatAddUp(TinyModule):
    """The second mean has two targets and one, the third one and two."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        number = (labels != -100).sum(1)
        total = F.cross_entropy(logits[:, 0], labels[:, 0])
        for place, mask in enumerate((number != 4, number != 6)):
            each = F.cross_entropy(logits[:, place], labels[:, 0], reduction="none")
            total = total + (each * mask).sum() / mask.sum().clamp(min=1)
        return total


class ZeroForNone(TinyModule):
    """A micro-batch without samples of a group has no mean, and counts nothing."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        mask = groups_of(labels, 3)[1]
        chosen = logits[mask].square()
        self.log("size", chosen.mean() if mask.any() else logits.sum() * 0.0)
        return super().loss(logits, labels)


class AsksOfGroups(TinyModule):
    """Looks at groups whose samples its loss doesn't choose."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        for group, mask in enumerate(groups_of(labels, 3)):
            if mask.any():
                self.log(f"size {group}", logits[mask].square().mean())
        return super().loss(logits, labels)


ONE = plan_of(pipeline(stage(0, 0, 3)))
GOOD = [Summed, MaskedByHand, NumbersOfChosen, MaskCountedBefore, Counted, Logging]
GOOD += [AsksOfGroups, ZeroForNone, SizesByNumpy]


@pytest.mark.parametrize("plan", PLANS)
def test_losses_and_logs_are_recognised_for_what_they_are(pool: ProcessPool, plan: str) -> None:
    expected = pool.run(fit_each, 1, GOOD, None)[0]
    for rank in pool.run(fit_each, 2, GOOD, PLANS[plan]):
        for make, found, alone in zip(GOOD, rank, expected, strict=True):
            assert isinstance(found, dict), (make, found)
            same(found, alone)
            assert not found["warned"]


def test_what_is_not_recognised_can_be_declared_and_is_warned_of(pool: ProcessPool) -> None:
    makes = [OpaqueSum, TwoLosses]
    expected = pool.run(fit_each, 1, makes, None)[0]
    for plan in PLANS.values():
        declared = pool.run(fit_each, 2, [OpaqueSum], plan, {"loss_reduction": "sum"})
        warned = pool.run(fit_each, 2, [Opaque, TwoLosses, SumAndMean], plan)
        for rank in range(2):
            same(declared[rank][0], expected[0])
            assert "different numbers of targets" in warned[rank][1]
            assert "The loss is a sum over samples and something else" in warned[rank][2]
        assert [item[0]["warned"] for item in warned] == [True, False]


def test_sizes_by_numpy_and_numbers_of_the_first_sample_are_warned_of(pool: ProcessPool) -> None:
    for plan in PLANS.values():
        found = pool.run(fit_each, 2, [ScaledByNumpy, ScaledByArray, LogsTheFirst], plan)[0]
        assert [item["warned"] for item in found] == [True] * 3


def test_means_over_groups_that_a_micro_batch_lacks_are_refused(pool: ProcessPool) -> None:
    makes = [ByGroup, ByGroupIfCounted, SumsByGroup, SharesThatAddUp]
    for plan in PLANS.values():
        for messages in pool.run(fit_each, 2, makes, plan):
            assert all("means over different numbers of targets" in item for item in messages)
    alone, found = (fit_each(0, [ByGroup], plan, {"num_microbatches": 1}) for plan in (None, ONE))
    same(found[0], alone[0])


def test_samples_that_meet_are_refused_where_batches_are_cut(pool: ProcessPool) -> None:
    makes = [Contrasts, MixesRows, Centres, PairsByHand, HardestByOrder, LaterOnesMore, Dice]
    for plan in PLANS.values():
        for messages in pool.run(fit_each, 2, makes, plan):
            assert all("needs all samples of a batch at once" in item for item in messages)
        for (found,) in pool.run(fit_each, 2, [Contrasts], plan, {"loss_reduction": "mean"}):
            assert len(found["losses"]) == 4
    for (message,) in pool.run(fit_each, 2, [WeighsByPlacesMadeBefore], PLANS["stages"]):
        assert "counts their places in the batch" in message
    alone, found = (
        fit_each(0, [Centres], plan, {"num_microbatches": 1})[0] for plan in (None, ONE)
    )
    same(found, alone)


def test_a_batch_that_nothing_cuts_needs_no_weights() -> None:
    alone, found = (fit_each(0, [Opaque], plan, {"num_microbatches": 1})[0] for plan in (None, ONE))
    same(found, alone)
    assert not found["warned"]
