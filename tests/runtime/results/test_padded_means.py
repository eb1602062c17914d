"""A mean that counts pads is warned of where pipelines pad to other lengths than one device."""

import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.models import pack_samples
from lightning_hetero.runtime.results.padded_means import (
    THE_LOSS,
    PaddedMeans,
    WholeMean,
    counting_pads,
)
from lightning_hetero.runtime.results.targets import LossWatch
from tests.processes import ProcessPool
from tests.runtime.step_cases import COPIES, STAGES, TinyModule, same
from tests.toy import VOCABULARY, quiet


def look(means: PaddedMeans, make: Callable[[Tensor, Tensor], Any], labels: Tensor) -> None:
    """Look at what a step makes of its logits and labels."""
    watch = LossWatch([], len(labels))
    watch.resume()
    try:
        loss = make(torch.randn(*labels.shape, 5), labels)
    finally:
        watch.stop()
    means.begin([labels], len(labels))
    means.see_averaged(watch.reductions.averaged)
    means.see(THE_LOSS, watch.reductions.of(loss))


def counts_pads(make: Callable[[Tensor, Tensor], Any], *rows: list[list[int]]) -> bool:
    """Whether that is found of a step, given the labels of each micro-batch."""
    means = PaddedMeans(waits=True)
    for labels in rows:
        look(means, make, torch.tensor(labels))
    return bool(counting_pads(means.found()))


SHORT, LONG = [[1, 2, 0], [3, 0, 0]], [[1, 2, 3, 4], [2, 0, 0, 0]]


def entropy(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x.mT, labels, reduction="none")


PADDED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a loss": lambda x, labels: F.cross_entropy(x.mT, labels),
    "of next tokens": lambda x, labels: F.cross_entropy(x[:, :-1].mT, labels[:, 1:]),
    "flattened": lambda x, labels: F.cross_entropy(x.flatten(0, 1), labels.flatten()),
    "scaled, with another": lambda x, labels: 0.5 * F.cross_entropy(x.mT, labels) + x.mean(),
    "over all elements": lambda x, labels: (x - labels[..., None]).square().mean(),
    "by hand": lambda x, labels: entropy(x, labels).sum() / labels.numel(),
    "of means of samples": lambda x, labels: entropy(x, labels).mean(1).mean(),
    "pooled": lambda x, labels: F.cross_entropy(x.mean(1), labels[:, 0]),
}
MASKED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "ignored": lambda x, labels: F.cross_entropy(x.mT, labels, ignore_index=0),
    "by a mask": lambda x, labels: (entropy(x, labels) * (labels > 0)).sum() / (labels > 0).sum(),
    "chosen": lambda x, labels: F.cross_entropy(x[labels > 0], labels[labels > 0]),
    "chosen elements": lambda x, labels: x[labels > 0].square().mean(),
    "each sample's own mean": lambda x, labels: (
        (entropy(x, labels) * (labels > 0)).sum(1) / (labels > 0).sum(1)
    ).mean(),
    "of first tokens": lambda x, labels: F.cross_entropy(x[:, 0], labels[:, 0]),
    "a sum": lambda x, labels: F.cross_entropy(x.mT, labels, ignore_index=0, reduction="sum"),
}


@pytest.mark.parametrize("name", PADDED)
def test_means_that_count_pads_are_found(name: str) -> None:
    assert counts_pads(PADDED[name], SHORT, LONG)
    assert not counts_pads(PADDED[name], SHORT, SHORT), "of one length"


@pytest.mark.parametrize("name", MASKED)
def test_means_without_pads_are_let_be(name: str) -> None:
    assert not counts_pads(MASKED[name], SHORT, LONG)
    # Of one micro-batch that has no pads nothing can be said.
    assert not counts_pads(MASKED[name], SHORT, [[1, 2, 3, 4], [2, 3, 4, 1]])


def test_what_does_not_follow_the_shapes_is_let_be() -> None:
    def found(*means: tuple[float, tuple[int, ...]]) -> tuple[str, ...]:
        return counting_pads(WholeMean("it", count, sizes) for count, sizes in means)

    assert found((6, (3, 6, 18)), (8, (4, 6, 24))) == ("it",)
    assert found((9, (3, 9)), (16, (4, 16))) == ("it",)
    assert not found((1, (3,)), (1, (4,)))
    assert not found((3, (3,)), (0, (4,)))
    assert not found((2.5, (3,)), (3, (4,)))
    assert not found((6, ()), (8, ()))


def test_packed_samples_have_no_pads() -> None:
    means = PaddedMeans(waits=True)
    for batch in pack_samples([[1, 2, 3], [4, 5]]), pack_samples([[4, 5]]):
        means.begin(batch, batch.num_samples)
        means.see_averaged([3])
    assert not means.found()


def pad(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def rows() -> list[Tensor]:
    lengths = [3, 8, 5, 4, 7, 2, 6, 3]
    return [torch.arange(length) * 5 % (VOCABULARY - 1) + 1 for length in lengths]


class Unmasked(TinyModule):
    validates = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.model(batch).mT, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("accuracy", (self.model(batch).argmax(-1) == batch).float().mean())


class Masked(Unmasked):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch)
        right = (logits.argmax(-1) == batch) * (batch > 0)
        self.log("accuracy", right.float().sum() / (batch > 0).sum())
        return F.cross_entropy(logits.mT, batch, ignore_index=0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))


def fit_padded(
    rank: int, make: Callable[[], TinyModule], plan: Any, reduction: str | None = None
) -> tuple[dict[str, Any], set[str]]:
    """Train and validate; returns what a rank knows, and what it is warned of."""
    L.seed_everything(3, verbose=False)
    module = make()
    run: dict[str, Any] = {"devices": 1}
    if plan is not None:
        strategy = HeteroStrategy(
            ParallelPlan.from_dict(plan),
            num_microbatches=2,
            whole_after_run=True,
            loss_reduction=reduction,
        )
        run = {"devices": 2, "strategy": strategy}
    trainer = L.Trainer(**quiet(max_epochs=2, num_sanity_val_steps=0), **run)
    batch_size = 4 if plan is None else 4 // len(plan["pipelines"])
    loaders = [DataLoader(rows(), batch_size=batch_size, collate_fn=pad) for _ in range(2)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, *loaders)
    known = {
        "losses": module.losses,
        "metrics": {name: float(item) for name, item in trainer.callback_metrics.items()},
        "weights": {name: item.numpy().copy() for name, item in module.state_dict().items()},
    }
    messages = [str(item.message) for item in caught]
    return known, {item.split(" runs over all")[0] for item in messages if " runs over" in item}


@pytest.mark.dist
def test_runs_whose_pipelines_pad_otherwise_are_warned_of(pool: ProcessPool) -> None:
    alone, _ = pool.run_alone(fit_padded, Masked, None)
    for known, told in pool.run(fit_padded, 2, Masked, COPIES):
        same(known, alone)
        assert not told
    told = pool.run(fit_padded, 2, Unmasked, COPIES)[0][1]
    assert told == {THE_LOSS, "What is logged as 'accuracy'"}
    told = pool.run(fit_padded, 2, Unmasked, COPIES, "mean")[0][1]
    assert told == {"What is logged as 'accuracy'"}
    # One pipeline pads its batch as one device does.
    alone, _ = pool.run_alone(fit_padded, Unmasked, None)
    for known, told in pool.run(fit_padded, 2, Unmasked, STAGES):
        same(known, alone)
        assert not told
