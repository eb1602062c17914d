"""Metrics have what one device has, in stages and copies, whatever their states are."""

from typing import Any

import pytest
from torch import Tensor
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanMetric,
    MetricCollection,
    PearsonCorrCoef,
    SumMetric,
)
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score

from tests.fits import Make, check, each, refused, warnings_of
from tests.plans import COPIES, STAGES
from tests.processes import ProcessPool
from tests.toy import VOCABULARY, TinyModule

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
        self.first_logits = CatMetric()
        self.of_steps = MulticlassAccuracy(VOCABULARY, average="micro", ignore_index=-100)
        self.only_updated = MeanMetric()
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
        self.only_updated.update(logits)
        self.log("of_steps", self.of_steps, on_step=True, on_epoch=True)
        self.log("only_updated", self.only_updated, on_step=True, on_epoch=True)
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
        self.first_logits.update(first)
        self.several(logits.flatten(0, 1), labels.flatten())
        self.log("auroc", self.auroc)
        self.log("highest", self.highest)
        self.log_dict(self.several)

    def on_validation_epoch_end(self) -> None:
        self.log("correlation", self.correlation.compute())
        self.log("mean_logit", self.mean_logit.compute())
        self.log("rows", self.first_logits.compute().sum())
        self.seen += sorted(self.first_logits.compute().tolist())
        for metric in (self.correlation, self.mean_logit, self.first_logits):
            metric.reset()


class ComputesInStep(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.mean_logit = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch[0])
        self.mean_logit.update(logits)
        return self.loss(logits, batch[1]) + self.mean_logit.compute()


class InSteps(TinyModule):
    """A metric that steps and hooks update, and one that only hooks do."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.of_hooks = MeanMetric(), SumMetric()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch[0])
        self.both.update(logits.detach())
        return self.loss(logits, batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.of_hooks.update(outputs["loss"])

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(self.of_hooks.compute()))
        self.of_hooks.reset()


class InStepsAndHooks(InSteps):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.both.update(outputs["loss"])


def test_metrics_are_those_of_one_device(pool: ProcessPool) -> None:
    check(pool, *each([Measured], STAGES, COPIES))
    check(pool, *each([InSteps], COPIES))


def test_no_rank_is_told_that_a_metric_lacks_what_others_have(pool: ProcessPool) -> None:
    for told in pool.run(warnings_of, 2, *each([Measured], STAGES)):
        assert "compute" not in told


def test_metrics_that_a_step_computes_or_hooks_share_are_refused(pool: ProcessPool) -> None:
    told: dict[Make, str] = {
        ComputesInStep: "MeanMetric computes inside a step",
        InStepsAndHooks: "Use one metric for each",
    }
    refused(pool, told, STAGES, COPIES)
