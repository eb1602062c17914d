"""Losses and layers of the cases that are judged right or refused: how a step may use samples.

Each is a function of rows, (samples, 4), or of a layer's hidden state, (samples, tokens, width).
Labels, mask and weights of the rows at hand are in `ROWS`.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Case = Callable[[Tensor], Any]
WEIGHT = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(7)))
TABLE = torch.randn(9, 4, generator=torch.Generator().manual_seed(8))
ADJACENT = torch.eye(4).to_sparse()
WIDTH = 4
ROWS = SimpleNamespace(
    labels=torch.tensor([0, -100, 2, 3, 1, 1]), mask=torch.tensor([1.0, 0, 1, 1, 0, 0])
)


def each(x: Tensor) -> Tensor:
    return F.cross_entropy(x, ROWS.labels, reduction="none")


def is_sure(x: Tensor) -> Tensor:
    return x.softmax(-1).amax(-1) > 0.4


def divergence(x: Tensor) -> Tensor:
    return torch.special.entr(x.softmax(-1)).trace()


def chosen(x: Tensor) -> Tensor:
    return each(x)[ROWS.mask > 0]


def named(x: Tensor) -> Tensor:
    rows = chosen(x)
    count = rows.shape[0]
    return rows.sum() / count


def shared(x: Tensor) -> Tensor:
    share = 1.0
    share *= x.shape[0]
    return x.mean() * share


def scaled(x: Tensor) -> Tensor:
    return 2 * (x.mean() / 2) * 0.5 * 2


def changed_in_place(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 0] = 0.0
    y += 1
    return y.square().mean()


def masked(labels: Tensor) -> Tensor:
    mask = torch.ones(len(labels))
    for i, label in enumerate(labels.tolist()):
        mask[i] = label > 1
    return mask


def in_bfloat16(x: Tensor) -> Tensor:
    rows = x.repeat(200, 1).bfloat16()
    return F.cross_entropy(rows, ROWS.labels.repeat(200)).float() + 0.1 * rows.abs().mean().float()


def _with_capacity(x: Tensor) -> Tensor:
    """Let one of two experts compute its tokens, first come first served."""
    tokens = x.flatten(0, 1)
    chosen = tokens[:, 0] > 0
    served = chosen & (chosen.cumsum(0) <= 5 * len(tokens) // 8)
    return torch.where(served[:, None], tokens.tanh(), 0.0).view_as(x)


MEANS: dict[str, Case] = {
    "mean": lambda x: x.square().mean(),
    "of rows": lambda x: x.square().mean(-1).mean(),
    "of chosen elements": lambda x: each(x)[ROWS.mask > 0].mean(),
    "masked by hand": lambda x: (each(x) * ROWS.mask).sum() / ROWS.mask.sum(),
    "with a floor": lambda x: (each(x) * ROWS.mask).sum() / ROWS.mask.sum().clamp(min=1),
    "with an eps": lambda x: (each(x) * ROWS.mask).sum() / (ROWS.mask.sum() + 1e-8),
    "of two means": lambda x: (each(x) * ROWS.mask).mean() / ROWS.mask.mean(),
    "cross entropy": lambda x: F.cross_entropy(x, ROWS.labels),
    "products of a sample": lambda x: torch.einsum("bd,bd->b", x, x).mean(),
    "by a weight": lambda x: torch.einsum("bd,dk->bk", x, WEIGHT).mean(),
    "scaled": lambda x: 0.5 * F.cross_entropy(x, ROWS.labels) / 3,
    "scaled by what is written": scaled,
    "of statistics along another dim that came first": lambda x: (
        x.view(len(x), 2, 2).transpose(0, 1).std(0).mean()
    ),
    "with a floor of zero": lambda x: torch.maximum(x, torch.zeros(())).mean(),
    "of what was turned": lambda x: (2 * x.T).mean(),
    "of what was turned and back": lambda x: (2 * x.T).t().sum(1).mean(),
    "scaled by a constant tensor": lambda x: 2 * x.mean() * torch.tensor(x.shape[1]),
    "with a penalty": lambda x: F.cross_entropy(x, ROWS.labels) + 0.1 * WEIGHT.square().sum(),
    "with zeros for gradients": lambda x: F.cross_entropy(x, ROWS.labels) + 0.0 * x.sum(),
    "begun by zero": lambda x: torch.tensor(0.0) + sum([F.cross_entropy(x, ROWS.labels)]),
    "a list of them": lambda x: torch.stack(
        [F.cross_entropy(x, ROWS.labels), F.cross_entropy(-x, ROWS.labels)]
    ).mean(),
    "weighted": lambda x: F.mse_loss(x[:, 0], -x[:, 0], weight=ROWS.mask),
    "by what a tensor has told": lambda x: each(x).sum() / (ROWS.labels != -100).sum().item(),
    "by a whole number of it": lambda x: each(x).sum() / int((ROWS.labels != -100).sum()),
    "by that or one": lambda x: each(x).sum() / max(1, (ROWS.labels != -100).sum().item()),
    "by the number of chosen elements": lambda x: chosen(x).sum() / len(chosen(x)),
    "by a name for it": named,
    "by a shape's product": lambda x: x.square().sum() / np.prod(x.shape),
    "times a shape's part": lambda x: x.mean() * float(np.prod(x.shape[1:])),
}

SUMS: dict[str, Case] = {
    "sum": lambda x: x.square().sum(),
    "of rows": lambda x: x.square().sum(-1).sum(),
    "along samples first": lambda x: x.sum(0).sum(),
    "cross entropy": lambda x: 0.05 * F.cross_entropy(x, ROWS.labels, reduction="sum"),
    "of two": lambda x: F.mse_loss(x, -x, reduction="sum") + each(x).sum(),
    "of means of samples that were turned": lambda x: (2 * x.T).mean(0).sum(),
    "begun by zero": lambda x: torch.tensor(0).float() + x.sum() + torch.zeros(()),
    "of rows one by one": lambda x: sum(2 * row.sum() for row in x),
    "of rows by their places": lambda x: sum(x[i].sum() for i in range(len(x))),
    "of columns": lambda x: x[:, 0].sum() + x[:, :2].sum() + x[:].sum() + x[:100].sum(),
    "of losses of parts": lambda x: sum(
        F.cross_entropy(one, other, reduction="sum")
        for one, other in zip(x.split(4), ROWS.labels.split(4), strict=True)
    ),
    "of losses of parts by hand": lambda x: sum(
        F.cross_entropy(one, other, reduction="none").sum()
        for one, other in zip(x.split(4), ROWS.labels.split(4), strict=True)
    ),
    "of chunks": lambda x: torch.stack([each(x)[:0].sum(), each(x).sum()]).sum(),
}

OTHERS: dict[str, Case] = {
    "weights of the batch's classes": lambda x: F.cross_entropy(
        x, ROWS.labels, weight=1.0 / torch.bincount(ROWS.labels + 100)[-4:]
    ),
    "what may be a mean by hand": lambda x: x.square().sum() * (1.0 / len(x)),
    "that of a loss": lambda x: F.cross_entropy(x, ROWS.labels, reduction="sum") * (1.0 / len(x)),
    "a product": lambda x: x.mean() * x.sum(),
    "a mean times a count": lambda x: x.mean() * len(x),
    "a mean divided by a count": lambda x: F.mse_loss(x, -x) / x.shape[0],
    "means of rows added": lambda x: sum((row.square().mean() for row in x), torch.tensor(0.0)),
    "means of what is half": lambda x: x[: len(x) // 2].mean() + x[len(x) // 2 :].mean(),
    "means of chunks": lambda x: sum(x.chunk(2)).mean(),
    "a sum of means over samples that were turned": lambda x: (2 * x.permute(1, 0)).mean(1).sum(),
    "a sum of the first": lambda x: x[0].sum(),
    "a sum of the last, changed": lambda x: (2 * x[-1]).square().sum(),
    "a loss of the first": lambda x: F.cross_entropy(x[0], ROWS.labels[0], reduction="sum"),
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
    "a mean of a share that changes": lambda x: shared(x),
    "a sum by a number": lambda x: x.sum() / len(x),
    "a sum by a number of others": lambda x: x.sum() / len(chosen(x)),
    "a sum by a number that was told of others": lambda x: x.sum() / ROWS.labels.max().item(),
    "a sum of what nobody knows": lambda x: torch.stack([divergence(x), divergence(-x)]).sum(),
    "a mean of what nobody knows": lambda x: torch.stack([divergence(x), divergence(-x)]).mean(),
    "what was normalised by the batch": lambda x: (x / x.sum()).square().mean(),
}

TOGETHER: dict[str, Case] = {
    "a root": lambda x: F.mse_loss(x, -x).sqrt(),
    "statistics of a batch": lambda x: x.std(0).mean(),
    "a nonlinear function of them": lambda x: x.mean(0).square().sum(),
    "samples against each other": lambda x: F.cross_entropy(x @ x.T, torch.arange(len(x))),
    "samples against each other by name": (
        lambda x: F.cross_entropy(torch.einsum("id,jd->ij", x, x), torch.arange(len(x)))
    ),
    "differences of samples": lambda x: (x[:, None] - x[None]).square().mean(),
    "samples against all targets by mistake": lambda x: (x[:, :1] - x[:, 1]).square().mean(),
    "distances of samples": lambda x: torch.cdist(x, x).mean(),
    "in the order of chance": lambda x: (x - x[torch.randperm(len(x))]).square().mean(),
    "in a copy of such an order": lambda x: (x - x[torch.randperm(len(x)).clone()]).square().mean(),
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
    "in an order made by chance": lambda x: (x * x[torch.rand(len(x)).argsort()]).mean(),
    "products by a function": lambda x: F.linear(x, x).mean(),
}

SEPARATE: dict[str, Case] = {
    "rows in another order": lambda x: each(x)[each(x).argsort()].mean(),
    "a table's rows": lambda x: (x + TABLE[torch.randint(9, (len(x),))]).mean(),
    "columns in another order": lambda x: (
        x[:, torch.randperm(4)] + x.flip(1) + x.roll(1, 1)
    ).mean(),
    "the largest of each": lambda x: x.topk(2).values.mean(),
    "norms of each": lambda x: x.norm(dim=1).mean(),
    "a table's products": lambda x: (x @ TABLE.T).mean(),
    "distances to a table": lambda x: torch.cdist(x, TABLE).mean(),
    "a distance to what is kept": lambda x: x.mean() + 0.1 * torch.norm(WEIGHT - TABLE[:4]),
    "rows with columns": lambda x: (x[:, :1] * x[:1].detach()[0]).mean(),
}

MIXED: dict[str, Case] = {
    "a sum and a mean": lambda x: 0.5 * (x.sum() + x.mean()),
    "a sum and a penalty": lambda x: x.sum() + WEIGHT.square().sum(),
    "a sum and what nobody knows": lambda x: (x.sum() + divergence(x)) + x.mean(),
    "a sum and a value from elsewhere": lambda x: x.sum() + x[0, 0],
}

MEETING: dict[str, Case] = {
    "pairs": lambda x: (x[::2] - x[1::2]).square().mean(),
    "halves": lambda x: (x[:3] * x[3:]).sum(-1).mean(),
    "sums of halves": lambda x: (x[:3] * x[3:]).sum(),
    "chunks": lambda x: F.mse_loss(*x.chunk(2)),
    "thirds": lambda x: F.triplet_margin_loss(x[:2], x[2:4], x[4:]),
    "rotated by hand": lambda x: (x * torch.cat([x[1:], x[:1]])).mean(),
    "one after the other": lambda x: sum((x[i] - x[i + 1]).square().mean() for i in (0, 2, 4)) / 3,
    "the hardest by order": lambda x: each(x)[each(x).argsort(descending=True)[:2]].mean(),
    "those above the mean": lambda x: each(x)[each(x) > each(x).mean()].mean(),
    "a power of a mean": lambda x: F.cross_entropy(x, ROWS.labels) ** 2,
}

BY_PLACE: dict[str, Case] = {
    "the first": lambda x: F.cross_entropy(x[0], ROWS.labels[0]),
    "the first row": lambda x: F.cross_entropy(x[:1], ROWS.labels[:1]),
    "the last, made fp32": lambda x: F.cross_entropy(x[-1].float(), ROWS.labels[-1]),
    "a half": lambda x: x[:3].square().mean(),
    "every second": lambda x: x[::2].square().mean(),
}

WEIGHED: dict[str, Case] = {
    "by a range": lambda x: (torch.arange(len(x)) * each(x)).mean(),
    "by a range over its sum": lambda x: (
        ((w := torch.arange(1.0, len(x) + 1)) * each(x)).sum() / w.sum()
    ),
    "by a line": lambda x: (torch.linspace(0.5, 1, len(x)) * each(x)).sum(),
    "by a range of Python's": lambda x: (torch.tensor(range(len(x))) * each(x)).mean(),
    "by a count": lambda x: (each(x) / torch.ones(len(x)).cumsum(0)).mean(),
    "by the places of its rows": lambda x: (torch.ones_like(x).cumsum(0) * x).square().mean(),
    "by a column": lambda x: (torch.arange(len(x))[:, None] * x).square().mean(),
    "by a matrix": lambda x: (torch.eye(len(x))[0] * each(x) + each(x)).mean(),
    "by powers": lambda x: (0.9 ** torch.arange(len(x)) * each(x)).mean(),
    "with rows taken": lambda x: (
        (rows := torch.arange(len(x))) * x.log_softmax(-1)[rows, ROWS.labels.clamp(0)]
    ).mean(),
}

ALONE: dict[str, Case] = {
    "a mean": lambda x: F.cross_entropy(x, ROWS.labels),
    "a sum": lambda x: F.cross_entropy(x, ROWS.labels, reduction="sum"),
    "one by one": lambda x: sum(F.cross_entropy(x[i], ROWS.labels[i]) for i in (0, 2, 3, 5)) / 4,
    "those with targets": lambda x: sum(
        F.cross_entropy(x[i], ROWS.labels[i]) for i in range(6) if ROWS.labels[i] >= 0
    ),
    "in another order": lambda x: each(x)[each(x).argsort()].mean(),
    "with dropout": lambda x: F.cross_entropy(F.dropout(x, 0.5), ROWS.labels),
    "with noise": lambda x: F.mse_loss(x, torch.randn_like(x)),
    "changed in place": changed_in_place,
    "rounded before the end": in_bfloat16,
    "at places of each": lambda x: x[torch.arange(len(x)), ROWS.labels.clamp(0)].mean(),
    "by its own weights": lambda x: (torch.arange(6.0)[ROWS.labels.clamp(0)] * each(x)).mean(),
    "by columns": lambda x: (torch.arange(4) * x).square().mean(),
    "with a mask": lambda x: (x * (torch.arange(4)[None] < ROWS.labels[:, None])).square().mean(),
    "by a mask that is written": lambda x: (masked(ROWS.labels) * each(x)).mean(),
    "by equal weights": lambda x: (torch.ones(len(x)) * each(x)).mean(),
    "drawn by trial": lambda x: x.mean() + torch.poisson(x.square()).mean(),
    "by torch.func": lambda x: torch.vmap(F.cross_entropy)(x, ROWS.labels.clamp(0)).mean(),
    "with sparse tensors": lambda x: (ADJACENT @ x.T).square().mean(),
    "by a divisor": lambda x: F.kl_div(x.log_softmax(-1), x.detach().softmax(-1)) / 3 + 1.0,
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
    "dropout": lambda x: F.dropout(x, 0.5),
    "experts": lambda x: torch.where(x[..., :1] > x[..., 1:2], x.tanh(), x.sin()),
    "instance norm": lambda x: F.instance_norm(x.mT).mT,
    "in place": lambda x: x.add_(1),
}
