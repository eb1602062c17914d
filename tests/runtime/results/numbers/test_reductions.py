"""What a number is over the samples of a micro-batch follows from how it was made."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.results.numbers.kinds import (
    OPERATIONS,
    Kind,
    Reduction,
    check_ratios,
    ends_of,
    ratio_of,
)
from lightning_hetero.runtime.results.targets import LossWatch

WEIGHT = nn.Parameter(torch.randn(4, 4))
TABLE = torch.randn(9, 4)
MASK = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
LABELS = torch.tensor([0, -100, 2, 3, -100, 1])


def each(x: Tensor) -> Tensor:
    return F.cross_entropy(x, LABELS, reduction="none")


def divergence(x: Tensor) -> Tensor:
    return torch.special.entr(x.softmax(-1)).trace()


class Rows(nn.Module):
    """A module that counts rows in its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.scale = 1, 2

    @property
    def number(self) -> int:
        return self.count

    def of(self, x: Tensor) -> "Rows":
        self.count = len(x)
        return self


ROWS = Rows()


def shared(x: Tensor) -> Tensor:
    share = 1.0
    share *= x.shape[0]
    return x.mean() * share


def scaled(x: Tensor) -> Tensor:
    rows, factor = ROWS.of(x), 0.5
    factor = factor * rows.scale
    return 2 * (x.mean() / rows.scale) * factor


def chosen(x: Tensor) -> Tensor:
    return each(x)[MASK > 0]


def named(x: Tensor) -> Tensor:
    rows = chosen(x)
    count = rows.shape[0]
    return rows.sum() / count


def judged(make: Callable[[Tensor], Any]) -> tuple[Kind, float] | None:
    x = torch.randn(6, 4, requires_grad=True)
    with LossWatch([TABLE], len(x)) as watch:
        result = make(x @ WEIGHT)
    found = watch.reductions.of(result)
    return None if found is None else (found.kind, float(found.count))


MEANS: dict[str, tuple[Callable[[Tensor], Any], float]] = {
    "mean": (lambda x: x.square().mean(), 24),
    "of rows": (lambda x: x.square().mean(-1).mean(), 6),
    "of chosen elements": (lambda x: each(x)[MASK > 0].mean(), 4),
    "masked by hand": (lambda x: (each(x) * MASK).sum() / MASK.sum(), 4),
    "with a floor": (lambda x: (each(x) * MASK).sum() / MASK.sum().clamp(min=1), 4),
    "with an eps": (lambda x: (each(x) * MASK).sum() / (MASK.sum() + 1e-8), 4),
    "of two means": (lambda x: (each(x) * MASK).mean() / MASK.mean(), 4),
    "cross entropy": (lambda x: F.cross_entropy(x, LABELS), 4),
    "of a sum of layers": (lambda x: F.cross_entropy(torch.stack([x, -x]).sum(0), LABELS), 4),
    "products of a sample": (lambda x: torch.einsum("bd,bd->b", x, x).mean(), 6),
    "by a weight": (lambda x: torch.einsum("bd,dk->bk", x, WEIGHT).mean(), 24),
    "scaled": (lambda x: 0.5 * F.cross_entropy(x, LABELS) / 3, 4),
    "scaled by what is written": (scaled, 24),
    "of statistics along another dim that came first": (
        lambda x: x.view(6, 2, 2).transpose(0, 1).std(0).mean(),
        12,
    ),
    "with a floor of zero": (lambda x: torch.maximum(x, torch.zeros(())).mean(), 24),
    "of what was turned": (lambda x: (2 * x.T).mean(), 24),
    "of what was turned and back": (lambda x: (2 * x.T).t().sum(1).mean(), 6),
    "scaled by a constant tensor": (lambda x: 2 * x.mean() * torch.tensor(x.shape[1]), 24),
    "with a penalty": (lambda x: F.cross_entropy(x, LABELS) + 0.1 * WEIGHT.square().sum(), 4),
    "with zeros for gradients": (lambda x: F.cross_entropy(x, LABELS) + 0.0 * x.sum(), 4),
    "begun by zero": (lambda x: torch.tensor(0.0) + sum([F.cross_entropy(x, LABELS)]), 4),
    "a list of them": (
        lambda x: torch.stack([F.cross_entropy(x, LABELS), F.cross_entropy(-x, LABELS)]).mean(),
        4,
    ),
    "on the way to a log": (lambda x: F.cross_entropy(x, LABELS).detach().item(), 4),
    "weighted": (lambda x: F.mse_loss(x[:, 0], -x[:, 0], weight=MASK), 4),
    "accuracy": (lambda x: (x.argmax(-1) == LABELS).float().mean(), 6),
    "by what a tensor has told": (lambda x: each(x).sum() / (LABELS != -100).sum().item(), 4),
    "by a whole number of it": (lambda x: each(x).sum() / int((LABELS != -100).sum()), 4),
    "by that or one": (lambda x: each(x).sum() / max(1, (LABELS != -100).sum().item()), 4),
    "by the number of chosen elements": (lambda x: chosen(x).sum() / len(chosen(x)), 4),
    "by a name for it": (named, 4),
    "by a shape's product": (lambda x: x.square().sum() / np.prod(x.shape), 24),
    "times a shape's part": (lambda x: x.mean() * float(np.prod(x.shape[1:])), 24),
}
SUMS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.square().sum(),
    "of rows": lambda x: x.square().sum(-1).sum(),
    "along samples first": lambda x: x.sum(0).sum(),
    "cross entropy": lambda x: 0.05 * F.cross_entropy(x, LABELS, reduction="sum"),
    "of two": lambda x: F.mse_loss(x, -x, reduction="sum") + each(x).sum(),
    "of means of samples that were turned": lambda x: (2 * x.T).mean(0).sum(),
    "begun by zero": lambda x: torch.tensor(0).float() + x.sum() + torch.zeros(()),
    "of rows one by one": lambda x: sum(2 * row.sum() for row in x),
    "of rows by their places": lambda x: sum(x[i].sum() for i in range(len(x))),
    "of columns": lambda x: x[:, 0].sum() + x[:, :2].sum() + x[:].sum() + x[:100].sum(),
    "of losses of parts": lambda x: sum(
        F.cross_entropy(one, other, reduction="sum")
        for one, other in zip(x.split(4), LABELS.split(4), strict=True)
    ),
    "of losses of parts by hand": lambda x: sum(
        F.cross_entropy(one, other, reduction="none").sum()
        for one, other in zip(x.split(4), LABELS.split(4), strict=True)
    ),
    "of chunks": lambda x: torch.stack([each(x)[:0].sum(), each(x).sum()]).sum(),
}
UNKNOWN: dict[str, Callable[[Tensor], Any]] = {
    "weights of the batch's classes": lambda x: F.cross_entropy(
        x, LABELS, weight=1.0 / torch.bincount(LABELS + 100)[-4:]
    ),
    "what may be a mean by hand": lambda x: x.square().sum() * (1.0 / len(x)),
    "that of a loss": lambda x: F.cross_entropy(x, LABELS, reduction="sum") * (1.0 / len(x)),
    "a product": lambda x: x.mean() * x.sum(),
    "a mean times a count": lambda x: x.mean() * len(x),
    "a mean divided by a count": lambda x: F.mse_loss(x, -x) / x.shape[0],
    "means of rows added": lambda x: sum((row.square().mean() for row in x), torch.tensor(0.0)),
    "losses of rows added": lambda x: torch.stack(
        [F.cross_entropy(x[i : i + 1], LABELS[i : i + 1]) for i in range(len(x))]
    ).sum(),
    "means of what is half": lambda x: x[: len(x) // 2].mean() + x[len(x) // 2 :].mean(),
    "means of chunks": lambda x: sum(x.chunk(2)).mean(),
    "a sum of means over samples that were turned": lambda x: (2 * x.permute(1, 0)).mean(1).sum(),
    "a sum of means of what was stacked": lambda x: torch.stack([x, -x]).mean(1).sum(),
    "a sum of the first": lambda x: x[0].sum(),
    "a sum of the last, changed": lambda x: (2 * x[-1]).square().sum(),
    "a loss of the first": lambda x: F.cross_entropy(x[0], LABELS[0], reduction="sum"),
    "a sum of the first ones": lambda x: x[:2].sum(),
    "a sum of as many as there are": lambda x: x[:6, 0].sum(),
    "a sum of every second": lambda x: x[::2].sum(-1).sum(),
    "a mean times a shape's product": lambda x: x.mean() * float(np.prod(x.shape)),
    "a mean over an array's number": lambda x: x.mean() / np.array(x.shape)[0],
    "one in a tensor": lambda x: x.mean() * torch.tensor(len(x)),
    "one in a filled tensor": lambda x: x.mean() * torch.full((), len(x)) * WEIGHT.sum(),
    "a share of the rows": lambda x: (len(x) / 24) * x.mean(),
    "a rounded share of the rows": lambda x: max(len(x) / 24, 0.1) * x.mean(),
    "a function of an argument": lambda x: torch.mul(x.mean(), float(len(x))),
    "a mean over a property": lambda x, rows=ROWS: x.mean() / rows.number,
    "a mean times what a step has set": lambda x, rows=ROWS: (
        rows.of(x).scale * x.mean() * rows.count
    ),
    "a mean of a share that changes": lambda x: shared(x),
    "a sum by a number": lambda x: x.sum() / len(x),
    "a sum by a number of others": lambda x: x.sum() / len(chosen(x)),
    "a sum by a number that was told of others": lambda x: x.sum() / LABELS.max().item(),
    "a sum of what nobody knows": lambda x: torch.stack([divergence(x), divergence(-x)]).sum(),
    "a mean of what nobody knows": lambda x: torch.stack([divergence(x), divergence(-x)]).mean(),
    "what was normalised by the batch": lambda x: (x / x.sum()).square().mean(),
}

TOGETHER: dict[str, Callable[[Tensor], Any]] = {
    "a root": lambda x: F.mse_loss(x, -x).sqrt(),
    "statistics of a batch": lambda x: x.std(0).mean(),
    "a nonlinear function of them": lambda x: x.mean(0).square().sum(),
    "samples against each other": lambda x: F.cross_entropy(x @ x.T, torch.arange(6)),
    "samples against each other by name": (
        lambda x: F.cross_entropy(torch.einsum("id,jd->ij", x, x), torch.arange(6))
    ),
    "differences of samples": lambda x: (x[:, None] - x[None]).square().mean(),
    "samples against all targets by mistake": lambda x: (x[:, :1] - x[:, 1]).square().mean(),
    "distances of samples": lambda x: torch.cdist(x, x).mean(),
    "in the order of chance": lambda x: (x - x[torch.randperm(6)]).square().mean(),
    "in a copy of such an order": lambda x: (x - x[torch.randperm(6).clone()]).square().mean(),
    "mixed with others": lambda x: F.mse_loss(0.7 * x + 0.3 * x.flip(0), -x),
    "moved along": lambda x: (x * torch.roll(x, 1, 0)).mean(),
    "the hardest": lambda x: each(x).topk(2).values.mean(),
    "sorted": lambda x: each(x).sort(descending=True)[0][:2].mean(),
    "covariance": lambda x: (x.T @ x).square().sum(),
    "statistics used": lambda x: ((x - x.std(0)) ** 2).mean(),
    "weighed by the largest": lambda x: (each(x) * (each(x) / each(x).max())).mean(),
    "capped by their median": lambda x: x.clamp(max=float(x.detach().median())).mean(),
    "normalised without statistics": lambda x: F.batch_norm(x, None, None, training=True).sum(),
    "centred": lambda x: (x - x.mean(0)).abs().mean(),
    "similarities": lambda x: F.cosine_similarity(x[:, None], x[None], -1).mean(),
    "the farthest": lambda x: torch.cdist(x, x).max(1)[0].mean(),
    "targets of the batch": lambda x: F.mse_loss(x, ((x - 1) / x.std(0)).detach()),
    "in an order made by chance": lambda x: (x * x[torch.rand(6).argsort()]).mean(),
    "products by a function": lambda x: F.linear(x, x).mean(),
}
SEPARATE: dict[str, Callable[[Tensor], Any]] = {
    "rows in another order": lambda x: each(x)[each(x).argsort()].mean(),
    "a table's rows": lambda x: (x + TABLE[torch.randint(9, (6,))]).mean(),
    "columns in another order": lambda x: (
        x[:, torch.randperm(4)] + x.flip(1) + x.roll(1, 1)
    ).mean(),
    "the largest of each": lambda x: x.topk(2).values.mean(),
    "norms of each": lambda x: x.norm(dim=1).mean(),
    "a table's products": lambda x: (x @ TABLE.T).mean(),
    "distances to a table": lambda x: torch.cdist(x, TABLE).mean(),
    "a distance to what is kept": lambda x: x.mean() + 0.1 * torch.norm(WEIGHT - TABLE[:4]),
    "a table made here": lambda x: (
        x * (torch.linspace(0, 1, 6)[:, None] - torch.linspace(0, 1, 6)[None]).sum()
    ).mean(),
    "rows with columns": lambda x: (x[:, :1] * x[:1].detach()[0]).mean(),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_what_samples_make_together_is_known(name: str) -> None:
    found = judged(TOGETHER[name])
    assert found is not None
    assert found[0] is Kind.TOGETHER


@pytest.mark.parametrize("name", SEPARATE)
def test_what_each_sample_makes_alone_is_known(name: str) -> None:
    found = judged(SEPARATE[name])
    assert found is not None
    assert found[0] is Kind.MEAN


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_known_with_what_it_averages_over(name: str) -> None:
    make, count = MEANS[name]
    assert judged(make) == (Kind.MEAN, count)


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_known(name: str) -> None:
    found = judged(SUMS[name])
    assert found is not None
    assert found[0] is Kind.SUM


MIXED: dict[str, Callable[[Tensor], Any]] = {
    "a sum and a mean": lambda x: 0.5 * (x.sum() + x.mean()),
    "a sum and a penalty": lambda x: x.sum() + WEIGHT.square().sum(),
    "a sum and what nobody knows": lambda x: (x.sum() + divergence(x)) + x.mean(),
    "a sum and a value from elsewhere": lambda x: x.sum() + x[0, 0],
}


@pytest.mark.parametrize("name", MIXED)
def test_a_sum_with_something_else_is_known_to_fit_no_weight(name: str) -> None:
    found = judged(MIXED[name])
    assert found is not None
    assert found[0] is Kind.MIXED


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_no_rule_covers_is_unknown(name: str) -> None:
    found = judged(UNKNOWN[name])
    assert found is None or found[0] is Kind.UNKNOWN


def test_extremes_are_known_and_constants_need_no_weight() -> None:
    assert judged(lambda x: x.max()) == (Kind.MAX, 24)
    assert judged(lambda x: x.amin()) == (Kind.MIN, 24)
    assert judged(lambda _: WEIGHT.norm()) == (Kind.CONSTANT, 0)
    assert judged(lambda x: x.exp()) is None


def test_means_over_other_targets_go_together_only_if_their_shares_stay() -> None:
    def ends(*pairs: tuple[float, float]) -> tuple[float, float]:
        ratios = [ratio_of((other,), torch.tensor(own)) for own, other in pairs]
        least, largest = ends_of([item for items in ratios for item in items], torch.device("cpu"))
        return float(least), float(largest)

    check_ratios(*ends(), "loss")
    check_ratios(*ends((2.0, 8.0), (3.0, 12.0), (0.0, 0.0)), "loss")
    for pairs in [((2.0, 8.0), (3.0, 8.0)), ((2.0, 8.0), (0.0, 8.0))]:
        with pytest.raises(StepError, match="sum of means over different numbers"):
            check_ratios(*ends(*pairs), "loss")


def test_a_list_of_one_number_of_one_sample_may_be_one_of_samples() -> None:
    for num_samples, kind in ((1, Kind.UNKNOWN), (2, Kind.MEAN)):
        with LossWatch([], num_samples) as watch:
            x = torch.randn(num_samples, 4)
            loss = torch.stack([F.cross_entropy(x, LABELS[2 : 2 + num_samples])]).mean()
        found = watch.reductions.of(loss)
        assert found is not None
        assert found.kind is kind


def test_indices_of_any_kind_are_no_reductions() -> None:
    assert judged(lambda x: x[..., None][:, 1:2].sum(-1).mean()) == (Kind.MEAN, 6)
    assert judged(lambda x: torch.stack([x, x])[..., 0][0].mean()) == (Kind.MEAN, 6)


def test_numbers_on_a_device_are_not_compared() -> None:
    # Those of "meta" have no values, so that each look at one is an error.
    there = torch.empty((), device="meta")
    filled = Reduction(Kind.CONSTANT, count=1, value=there)
    total = Reduction(Kind.SUM, count=6, value=there)
    for left, right in ((total, filled), (replace(total, count=there), replace(filled, value=6))):
        assert OPERATIONS["div"](left, right).kind is Kind.UNKNOWN
