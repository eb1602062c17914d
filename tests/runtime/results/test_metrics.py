"""Metrics have what one device has, in stages and copies, whatever their states are."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanMetric,
    Metric,
    MetricCollection,
    PearsonCorrCoef,
    SumMetric,
)
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score

from tests.processes import ProcessPool
from tests.runtime.step_cases import COPIES, PLANS, TinyModule, fit_each, same
from tests.toy import VOCABULARY

pytestmark = pytest.mark.dist


class Measured(TinyModule):
    """States that are sums, lists, extremes, or reduced by no rule; values of steps and epochs."""

    validates = True

    def __init__(self) -> None:
        super().__init__()
        self.auroc = BinaryAUROC()
        self.correlation = PearsonCorrCoef()
        self.mean_logit = MeanMetric()
        self.highest = MaxMetric()
        self.rows = CatMetric()
        self.of_steps = MulticlassAccuracy(VOCABULARY, average="micro", ignore_index=-100)
        self.several = MetricCollection(
            {
                "accuracy": MulticlassAccuracy(VOCABULARY, average="micro", ignore_index=-100),
                "f1": MulticlassF1Score(VOCABULARY, ignore_index=-100),
            }
        )
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels = batch
        logits = self.model(ids)
        self.of_steps(logits.flatten(0, 1), labels.flatten())
        self.log("of_steps", self.of_steps, on_step=True, on_epoch=True)
        return self.loss(logits, labels)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.seen.append(float(self.trainer.callback_metrics["of_steps_step"]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ids, labels = batch
        logits = self.model(ids)
        first = logits[:, 0, 0]
        self.auroc(first.sigmoid(), ids[:, 1] % 2)
        self.correlation.update(first, ids[:, 1].float())
        self.mean_logit.update(logits)
        self.highest.update(logits)
        self.rows.update(first)
        self.several(logits.flatten(0, 1), labels.flatten())
        self.log("auroc", self.auroc)
        self.log("highest", self.highest)
        self.log_dict(self.several)

    def on_validation_epoch_end(self) -> None:
        self.log("correlation", self.correlation.compute())
        self.log("mean_logit", self.mean_logit.compute())
        self.log("rows", self.rows.compute().sum())
        self.seen += self.rows.compute().tolist()
        for metric in (self.correlation, self.mean_logit, self.rows):
            metric.reset()


class ComputesInStep(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.mean_logit = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch[0])
        self.mean_logit.update(logits)
        return self.loss(logits, batch[1]) + self.mean_logit.compute()


class Exponential(Metric):
    """One of a user's own, which keeps a whole number."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), "sum")
        self.add_state("count", torch.tensor(0), "sum")

    def update(self, loss: Tensor, count: Any) -> None:
        self.total += loss * count
        self.count += count

    def compute(self) -> Tensor:
        return (self.total / self.count).exp()


class FedWithNumbers(TinyModule):
    """Gives metrics numbers of the batch, in steps and hooks, instead of samples."""

    validates = True

    def __init__(self) -> None:
        super().__init__()
        self.train_loss, self.val_loss = MeanMetric(), MeanMetric()
        self.by_samples, self.worst = MeanMetric(), MaxMetric()
        self.num_targets, self.each = SumMetric(), CatMetric()
        self.both = MetricCollection({"mean": MeanMetric(), "max": MaxMetric()})
        self.inputs, self.of_hooks, self.own = MeanMetric(), SumMetric(), Exponential()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels = batch
        self.inputs(ids.float())  # On each stage.
        loss = self.loss(self.model(ids), labels)
        self.train_loss(loss)
        self.log("train_loss", self.train_loss, on_step=True, on_epoch=True)
        self.num_targets.update((labels != -100).sum())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.of_hooks.update(outputs["loss"])
        self.seen.append(float(self.trainer.callback_metrics["train_loss_step"]))

    def on_train_epoch_end(self) -> None:
        for metric in (self.num_targets, self.inputs, self.of_hooks):
            self.seen.append(float(metric.compute()))
            metric.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ids, labels = batch
        loss = self.loss(self.model(ids), labels)
        for metric in (self.val_loss, self.worst, self.each, self.both):
            metric.update(loss)
        self.by_samples.update(loss, weight=len(ids))
        self.log("val_loss", self.val_loss)
        self.own(loss, (labels != -100).sum())
        self.log("own", self.own)
        self.log("worst", self.worst)
        self.log("by_samples", self.by_samples)
        self.log_dict(self.both)

    def on_validation_epoch_end(self) -> None:
        self.seen += self.each.compute().tolist()
        self.each.reset()


class NumbersAmongSamples(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.logits = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch[0])
        loss = self.loss(logits, batch[1])
        self.logits.update(logits.detach(), loss.detach())
        return loss


class NumbersAndSamples(NumbersAmongSamples):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch[0])
        loss = self.loss(logits, batch[1])
        self.logits.update(logits.detach())
        self.logits.update(loss.detach())
        return loss


@pytest.mark.parametrize("plan", PLANS)
def test_metrics_get_numbers_of_the_batch(pool: ProcessPool, plan: str) -> None:
    (expected,) = pool.run(fit_each, 1, [FedWithNumbers], None)[0]
    for (found,) in pool.run(fit_each, 2, [FedWithNumbers], PLANS[plan]):
        assert isinstance(found, dict), found
        same(found, expected)
        assert found["seen"] == pytest.approx(expected["seen"], rel=1e-4)


def test_metrics_get_samples_or_numbers_of_the_batch(pool: ProcessPool) -> None:
    makes = [NumbersAmongSamples, NumbersAndSamples]
    for among, mixed in pool.run(fit_each, 2, makes, COPIES):
        assert "gets a mean over the samples of a micro-batch" in among
        assert "Use one metric for each" in mixed


@pytest.mark.parametrize("plan", PLANS)
def test_metrics_are_those_of_one_device(pool: ProcessPool, plan: str) -> None:
    (expected,) = pool.run(fit_each, 1, [Measured], None)[0]
    for found, refused in pool.run(fit_each, 2, [Measured, ComputesInStep], PLANS[plan]):
        assert isinstance(found, dict), found
        same(found, expected)
        assert sorted(found["seen"]) == pytest.approx(sorted(expected["seen"]), rel=1e-4)
        assert "MeanMetric computes inside a step" in str(refused)
