"""What is logged in micro-batches becomes one value, the same on every rank."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fits import check, each, refused, warnings_of
from tests.plans import COPIES, STAGES, UNEQUAL
from tests.processes import ProcessPool
from tests.toy import ROWS, TinyModule

FUNCTIONS: dict[str, Any] = {"sum": sum, "max": max, "min": torch.min}


class LogsAll(TinyModule):
    """Logs losses, which all are means over targets, with and without a batch size."""

    validates = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels = batch
        self.log("before the model", ids.float().mean(), batch_size=len(ids))
        logits = self.model(ids)
        loss = self.loss(logits, labels)
        self.log("train", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"constant": 2.5, "synced": loss.detach()}, on_epoch=True, sync_dist=True)
        found = {"sum": (labels != -100).sum(), "max": ids.max(), "min": ids.min()}
        for name, value in found.items():
            options = {"on_step": False, "on_epoch": True}
            self.log(name, value.float(), reduce_fx=name, **options)
            self.log(f"{name}, a function", value.float(), reduce_fx=FUNCTIONS[name], **options)
        if (ids == 3).any():
            self.log("rare", 1.0, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.look()

    def on_train_epoch_end(self) -> None:
        self.look()
        self.log("behind all steps", 1.5)

    def look(self) -> None:
        bar = [float(value) for value in self.trainer.progress_bar_metrics.values()]
        self.seen = [*(self.seen or []), bar]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ids, labels = batch
        logits = self.model(ids)
        loss = self.loss(logits, labels)
        self.log_dict({"loss": loss, "number": loss.item(), "twice": 2 * loss})
        options = {"on_step": False, "on_epoch": True}
        self.log("hits", (logits.argmax(-1) == labels).sum(), reduce_fx="sum", **options)
        self.log("highest", logits.max(), reduce_fx="max", **options)
        self.log("synced", loss, sync_dist=True)
        self.log("of samples", logits.square().mean(), batch_size=len(ids))


class Summed(TinyModule):
    """Logs the loss as it is, a sum."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return 0.01 * F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class LogsMedian(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("median", loss, reduce_fx=lambda values: values.median())
        return loss


class SumsCollected(TinyModule):
    """Sums over ranks what each of them has whole, or something that each has of its own."""

    validates = True

    def __init__(self, *, is_whole: bool) -> None:
        super().__init__()
        self.is_whole, self.found = is_whole, list[Tensor]()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.found.append(self.model(batch[0]).argmax(-1))

    def on_validation_epoch_end(self) -> None:
        whole = torch.cat(self.found).sum().float() + 1
        value = whole if self.is_whole else float(self.global_rank)
        self.log("sum", value, sync_dist=True, reduce_fx="sum")


@pytest.mark.dist
def test_what_steps_log_is_what_one_device_logs(pool: ProcessPool) -> None:
    check(pool, *each([LogsAll, Summed], STAGES, UNEQUAL))
    # Micro-batches without targets count nothing; without any, what is logged still is there.
    for num_empty in (2, ROWS):
        check(pool, *each([LogsAll], STAGES, COPIES, num_empty=num_empty))


@pytest.mark.dist
def test_logs_that_would_count_ranks_are_told_and_unknown_reductions_refused(
    pool: ProcessPool,
) -> None:
    for is_whole in (True, False):
        (case,) = each([partial(SumsCollected, is_whole=is_whole)], STAGES)
        told, _ = pool.run(warnings_of, 2, case)
        assert ("sum counts it once for each" in told) == is_whole
    refused(pool, {LogsMedian: "Lightning knows mean, sum, min and max"}, STAGES, COPIES)
