"""What is done to slices, cut in either dim, is what is done to the whole, or it is refused."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.slices.slice_uses import SliceUses

Changes = Callable[[Tensor, Tensor], Any]
"""Changes the gradient of a weight in place."""
# As many rows in a slice as the weight has columns, and the other way round: shapes alone would
# take a mean over what is cut for one over the other dim.
CUTS = {"rows": ((8, 4), 0), "columns": ((4, 8), 1)}

# fmt: off
BY_DIM: dict[str, Callable[[Tensor, Tensor, int], Any]] = {
    "norm": lambda g, w, dim: g.div_(g.norm(dim=dim, keepdim=True) + 1),
    "mean": lambda g, w, dim: g.sub_(g.mean(dim).unsqueeze(dim)),
    "var": lambda g, w, dim: g.div_(g.var(dim=dim, keepdim=True) + 1),
    "vector_norm": lambda g, w, dim: g.div_(torch.linalg.vector_norm(g, dim=dim, keepdim=True) + 1),
    "max": lambda g, w, dim: g.clamp_(max=g.max(dim=dim, keepdim=True).values / 2),
    "any": lambda g, w, dim: g.mul_((g > 1).any(dim=dim, keepdim=True)),
    "count_nonzero": lambda g, w, dim: g.div_(1 + g.count_nonzero(dim=dim).unsqueeze(dim)),
    "masked": lambda g, w, dim: g.masked_fill_(g < g.mean(dim, keepdim=True), 0.0),
    "einsum": lambda g, w, dim: g.mul_(torch.einsum(f"ij,ij->{'ji'[dim]}", w, w).unsqueeze(dim)),
    "sum": lambda g, w, dim: g.sub_((g * w).sum(dim, keepdim=True) * w),
    "cosine": lambda g, w, dim: g.mul_(F.cosine_similarity(g, w, dim=dim).unsqueeze(dim)),
    "unsqueezed": lambda g, w, dim: g.sub_(g.unsqueeze(0).mean(dim + 1, keepdim=True)[0]),
    "cumsum": lambda g, w, dim: g.copy_(g.cumsum(dim)),
    "softmax": lambda g, w, dim: g.copy_(g.softmax(dim)),
    "flip": lambda g, w, dim: g.copy_(g.flip(dim)),
    "sort": lambda g, w, dim: g.copy_(g.sort(dim=dim).values),
    "fft": lambda g, w, dim: g.copy_(torch.fft.fft(g, dim=dim).real),
    "topk": lambda g, w, dim: g.mul_(g >= g.topk(2, dim=dim).values.amin(dim, keepdim=True)),
    "select": lambda g, w, dim: g.select(dim, 0).zero_(),
    "narrow": lambda g, w, dim: g.narrow(dim, 1, 2).zero_(),
    "chunk": lambda g, w, dim: g.chunk(2, dim)[0].zero_(),
    "index_fill": lambda g, w, dim: g.index_fill_(dim, torch.tensor([0]), 0.0),
    "gather": lambda g, w, dim: g.copy_(g.gather(dim, w.argsort(dim))),
    "halves": lambda g, w, dim: g.unflatten(dim, (2, -1)).select(dim, 0).zero_(),
    "unbind": lambda g, w, dim: next(iter(g.unbind(dim))).zero_(),
    "getitem": lambda g, w, dim: g[(slice(None),) * dim + (0,)].zero_(),
    "setitem": lambda g, w, dim: g.__setitem__((..., slice(2)) + (slice(None),) * (1 - dim), 0.0),
    "None": lambda g, w, dim: g[(None,) + (slice(None),) * dim + (0,)].zero_(),
    "mask": lambda g, w, dim: g.mul_(torch.where(g > 0, g, w).amax(dim, keepdim=True)),
}
ALWAYS: dict[str, Changes] = {
    "elements": lambda g, w: g.mul_(w.sigmoid()).clamp_(-0.1, 0.1),
    "where": lambda g, w: g.copy_(torch.where(g.abs() > 0.1, g, 0.0)),
    "masked": lambda g, w: g.__setitem__(g.abs() < 0.1, 0.0),
    "average": lambda g, w: g.add_(torch.zeros(w.shape).lerp_(w, 0.1) * 2 + 0.9 * g),
    "flat": lambda g, w: g.view(-1).mul_(0.5 * w.flatten().abs()),
    "to": lambda g, w: g.copy_(g.double().cpu().to(torch.float32) * 2),
}
NEVER: dict[str, Changes] = {
    "products": lambda g, w: g.copy_(g @ w.T @ g),
    "outer": lambda g, w: g.mul_(torch.einsum("ij,kl->", g, w)),
    "flat": lambda g, w: g.view(-1)[3:].zero_(),
    "flat norm": lambda g, w: g.div_(g.flatten().view(2, -1).norm(dim=1).max()),
    "layer_norm": lambda g, w: g.copy_(F.layer_norm(g, g.shape)),
    "stored": lambda g, w: g.mul_(torch.zeros(3, 4).index_copy_(
        0, torch.tensor([0]), g.mean(1 if len(g) == 4 else 0)[None, :4]).sum()),
}
# fmt: on


def use(change: Changes, cut: str) -> tuple[Tensor, list[Any]]:
    """Return what becomes of a whole gradient, and of its two slices; None where it is refused."""
    (shape, dim), generator = CUTS[cut], torch.Generator().manual_seed(0)
    weight, gradient = (torch.randn(shape, generator=generator) for _ in range(2))
    found: list[Any] = []
    for index in range(2):
        own = nn.Parameter(weight.chunk(2, dim)[index].clone())
        own.grad = gradient.chunk(2, dim)[index].clone()
        store: Any = SimpleNamespace(
            masters={"w": own},
            specs={"w": SimpleNamespace(shape=shape)},
            kept={"w": ((4 * index, 4 * index + 4),)},
        )
        uses = SliceUses(store)
        uses.start()
        try:
            with torch.no_grad():
                change(own.grad, own)
            found.append(own.grad)
        except StepError:
            found.append(None)
        finally:
            uses.stop()
    change(gradient, weight)
    return gradient, found


def is_right(whole: Tensor, found: list[Any], cut: str) -> bool:
    parts = zip(whole.chunk(2, CUTS[cut][1]), found, strict=True)
    return all(own is not None and torch.allclose(part, own, atol=1e-6) for part, own in parts)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", BY_DIM)
def test_functions_along_the_dim_that_is_cut_are_refused_and_others_right(
    name: str, cut: str
) -> None:
    dim = CUTS[cut][1]
    whole, found = use(lambda g, w: BY_DIM[name](g, w, 1 - dim), cut)
    assert is_right(whole, found, cut)
    _, found = use(lambda g, w: BY_DIM[name](g, w, dim), cut)
    assert found == [None, None]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", ALWAYS)
def test_what_goes_by_elements_is_right(name: str, cut: str) -> None:
    whole, found = use(ALWAYS[name], cut)
    assert is_right(whole, found, cut)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", NEVER)
def test_what_needs_the_other_rows_is_refused(name: str, cut: str) -> None:
    assert use(NEVER[name], cut)[1] == [None, None]
