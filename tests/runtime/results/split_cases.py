"""Losses and layers by what the check must find: a mean, a sum, or samples that meet.

Each is a function of rows, (samples, 4), or of a layer's hidden state, (samples, tokens, width).
Labels and mask of the rows at hand are in `ROWS`. No two have the same gradients up to a factor.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Case = Callable[[Tensor], Any]
WEIGHT = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(7)))
TABLE = torch.randn(9, 4, generator=torch.Generator().manual_seed(8))
WIDTH = 4
ROWS = SimpleNamespace(
    labels=torch.tensor([0, -100, 2, 3, 1, 1]), mask=torch.tensor([1.0, 0, 1, 1, 0, 0])
)


def each(x: Tensor) -> Tensor:
    return F.cross_entropy(x, ROWS.labels, reduction="none")


def changed_in_place(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 0] = 0.0
    y += 1
    return y.square().mean()


def in_bfloat16(x: Tensor) -> Tensor:
    rows = x.repeat(200, 1).bfloat16()
    return F.cross_entropy(rows, ROWS.labels.repeat(200)).float() + 0.1 * rows.abs().mean().float()


MEANS: dict[str, Case] = {
    "of elements": lambda x: x.square().mean(),
    "over targets": lambda x: F.cross_entropy(x, ROWS.labels),
    "over a mask": lambda x: (each(x) * ROWS.mask).sum() / ROWS.mask.sum().clamp(min=1),
    "over samples": lambda x: each(x).sum() / len(x),
    "by a weight": lambda x: torch.einsum("bd,dk->bk", x, WEIGHT).mean(),
    "of statistics of samples": lambda x: x.view(len(x), 2, 2).transpose(0, 1).std(0).mean(),
    "with a floor of zero": lambda x: torch.maximum(x, torch.zeros(())).mean(),
    "with a penalty": lambda x: F.cross_entropy(x, ROWS.labels) + 0.1 * WEIGHT.square().sum(),
    "of two": lambda x: F.cross_entropy(x, ROWS.labels) + F.cross_entropy(-x, ROWS.labels),
    "of weighted elements": lambda x: F.mse_loss(x[:, 0], -x[:, 0], weight=ROWS.mask),
    "of the largest of each": lambda x: x.topk(2).values.mean(),
    "of norms of each": lambda x: x.norm(dim=1).mean(),
    "of products with a table": lambda x: (x @ TABLE.T).mean(),
    "of distances to a table": lambda x: torch.cdist(x, TABLE).mean(),
    "with a distance of weights": lambda x: x.mean() + 0.1 * torch.norm(WEIGHT - TABLE[:4]),
    "changed in place": changed_in_place,
    "rounded before the end": in_bfloat16,
    "at places of each": lambda x: x[torch.arange(len(x)), ROWS.labels.clamp(0)].mean(),
    "by its own weights": lambda x: (torch.arange(6.0)[ROWS.labels.clamp(0)] * each(x)).mean(),
    "by columns": lambda x: (torch.arange(4) * x).square().mean(),
    "with a mask": lambda x: (x * (torch.arange(4)[None] < ROWS.labels[:, None])).square().mean(),
    "by torch.func": lambda x: torch.vmap(F.cross_entropy)(x, ROWS.labels.clamp(0)).mean(),
    "by a divisor": lambda x: F.kl_div(x.log_softmax(-1), x.detach().softmax(-1)) / 3 + 1.0,
}
SUMS: dict[str, Case] = {
    "of elements": lambda x: x.square().sum(),
    "of losses": lambda x: 0.05 * F.cross_entropy(x, ROWS.labels, reduction="sum"),
    "of two": lambda x: F.mse_loss(x, -x, reduction="sum") + each(x).sum(),
    "of columns": lambda x: x[:, 0].sum() + x[:, :2].sum() + x[:].sum() + x[:100].sum(),
    "of means of rows": lambda x: sum((row.square().mean() for row in x), torch.tensor(0.0)),
    "by a mean times a count": lambda x: x.mean() * torch.full((), len(x)) * WEIGHT.sum(),
}
MEETING: dict[str, Case] = {
    "a root": lambda x: F.mse_loss(x, -x).sqrt(),
    "a power of a mean": lambda x: F.cross_entropy(x, ROWS.labels) ** 2,
    "a product of mean and sum": lambda x: x.mean() * x.sum(),
    "a mean divided by a count": lambda x: F.mse_loss(x, -x) / x.shape[0],
    "a sum over a label": lambda x: x.sum() / ROWS.labels.max().item(),
    "a sum and a mean": lambda x: 0.5 * (x.sum() + x.mean()),
    "a sum and a penalty": lambda x: x.sum() + WEIGHT.square().sum(),
    "weights of the batch's classes": lambda x: F.cross_entropy(
        x, ROWS.labels, weight=1.0 / torch.bincount(ROWS.labels + 100)[-4:]
    ),
    "statistics of a batch": lambda x: x.std(0).mean(),
    "centred": lambda x: (x - x.mean(0)).abs().mean(),
    "normalised": lambda x: F.batch_norm(x, None, None, training=True).sum(),
    "normalised by its sum": lambda x: (x / x.sum()).square().mean(),
    "targets of the batch": lambda x: F.mse_loss(x, ((x - 1) / x.std(0)).detach()),
    "weighed by the largest": lambda x: (each(x) * (each(x) / each(x).max())).mean(),
    "capped by the median": lambda x: x.clamp(max=float(x.detach().median())).mean(),
    "those above the mean": lambda x: each(x)[each(x) > each(x).mean()].mean(),
    "the hardest": lambda x: each(x).topk(2).values.mean(),
    "covariance": lambda x: (x.T @ x).square().sum(),
    "contrast": lambda x: F.cross_entropy(x @ x.T, torch.arange(len(x))),
    "differences": lambda x: (x[:, None] - x[None]).square().mean(),
    "targets of others by mistake": lambda x: (x[:, :1] - x[:, 1]).square().mean(),
    "distances": lambda x: torch.cdist(x, x).max(1)[0].mean(),
    "similarities": lambda x: F.cosine_similarity(x[:, None], x[None], -1).mean(),
    "mixed with others": lambda x: F.mse_loss(0.7 * x + 0.3 * x.flip(0), -x),
    "moved along": lambda x: (x * torch.roll(x, 1, 0)).mean(),
    "pairs": lambda x: (x[::2] - x[1::2]).square().mean(),
    "chunks": lambda x: F.mse_loss(*x.chunk(2)),
    "triplets": lambda x: F.triplet_margin_loss(x[:2], x[2:4], x[4:]),
    "the first": lambda x: F.cross_entropy(x[0], ROWS.labels[0]),
    "the last, changed": lambda x: (2 * x[-1]).square().sum(),
    "a half": lambda x: x[:3].square().mean(),
    "every second": lambda x: x[::2].square().mean(),
    "by a line": lambda x: (torch.linspace(0.5, 1, len(x)) * each(x)).sum(),
    "by a range": lambda x: (torch.arange(len(x))[:, None] * x).square().mean(),
    "by a range over its sum": lambda x: (
        ((w := torch.arange(1.0, len(x) + 1)) * each(x)).sum() / w.sum()
    ),
    "by a count": lambda x: (each(x) / torch.ones(len(x)).cumsum(0)).mean(),
    "by a row of a matrix": lambda x: (torch.eye(len(x))[0] * each(x) + each(x)).mean(),
    "by powers": lambda x: (0.9 ** torch.arange(len(x)) * each(x)).mean(),
}
LAYERS_MEETING: dict[str, Case] = {
    "centred": lambda x: x - x.mean(0),
    "scaled by what autograd doesn't see": lambda x: x / x.std(0, unbiased=False).detach().add(1),
    "normalised": lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True).mT,
    "attention over samples": lambda x: torch.softmax(x @ x.mT, 0) @ x,
    "the next sample's": lambda x: x.roll(-1, 0),
    "the first one's": lambda x: torch.cat([x[:1], x[1:] - x[:1]]),
}
LAYERS_APART: dict[str, Case] = {
    "layer norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "attention": lambda x: torch.softmax(x @ x.mT, -1) @ x,
    "statistics of a sample": lambda x: x - x.mean((1, 2), keepdim=True),
    "experts": lambda x: torch.where(x[..., :1] > x[..., 1:2], x.tanh(), x.sin()),
    "instance norm": lambda x: F.instance_norm(x.mT).mT,
    "in place": lambda x: x.add_(1),
}
