"""Whether a loss may be cut, and what it is over, is measured by gradients of halves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.results.counts import Counting, LossReduction, LossRule
from lightning_hetero.runtime.results.split_check import Evidence, Limits, Verdict, judge
from tests.runtime.results import split_cases as cases
from tests.runtime.results.split_cases import ROWS, WIDTH

TOKENS = 5
NUM_ROWS = 6
LABELS, MASK = ROWS.labels, ROWS.mask
REFUSED = "refused"


class Model(nn.Module):
    """Rows times a weight, scaled and shifted; or a residual layer and a head."""

    def __init__(self, layer: cases.Case | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.layer is not None:
            y = x + self.layer(y)
        return y * self.gain + self.bias


def evidence_of(
    loss_of: Callable[[nn.Module, Any], Tensor],
    model: nn.Module,
    batch: dict[str, Tensor],
    dtype: torch.dtype,
) -> Evidence:
    gradients, parts = [], [slice(0, NUM_ROWS), slice(0, NUM_ROWS // 2), slice(NUM_ROWS // 2, None)]
    chosen = [*model.parameters()]
    if cases.WEIGHT.dtype is dtype:
        chosen.append(cases.WEIGHT)
    for rows in parts:
        part = {name: item[rows] for name, item in batch.items()}
        ROWS.labels, ROWS.mask = part["labels"], part["mask"]
        loss = loss_of(model, part["x"])
        found = torch.autograd.grad(loss, chosen, allow_unused=True)
        pairs = zip(found, chosen, strict=True)
        flat = [torch.zeros_like(p) if g is None else g for g, p in pairs]
        gradients.append(torch.cat([item.reshape(-1).float() for item in flat]))
    ROWS.labels, ROWS.mask = LABELS, MASK
    counts = {}
    for way in Counting.likely(batch, None):
        first, second, third = (
            float(way.of({n: item[rows] for n, item in batch.items()}, None)) for rows in parts
        )
        counts[way] = (first, second, third)
    return Evidence.of(
        gradients, counts, num_samples=NUM_ROWS, limits=Limits.of(dtype), is_random=False
    )


def verdict_of(
    loss_of: Callable[[nn.Module, Any], Tensor],
    model: nn.Module,
    *,
    dtype: torch.dtype,
    num_steps: int,
    shape: tuple[int, ...] = (WIDTH,),
) -> str:
    generator = torch.Generator().manual_seed(3)
    batch = {
        "x": torch.randn((NUM_ROWS, *shape), generator=generator).to(dtype),
        "mask": MASK,
        "labels": LABELS,
    }
    model = model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(num_steps):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), torch.zeros_like(batch["x"])).backward()
        optimizer.step()
    before = LossRule(LossReduction.MEAN, Counting.usual(batch, None))
    try:
        found = evidence_of(loss_of, model, batch, dtype)
    except (RuntimeError, ValueError, IndexError):
        return "fails"
    try:
        verdict = judge([found], before, None, allow_mixing=False)
    except StepError:
        return REFUSED
    if not verdict.is_verified:
        return "unverified"
    return "sum" if verdict.rule.is_sum else "mean"


RANDOM = {"in the order of chance", "in a copy of such an order", "in an order made by chance"}
RANDOM |= {"a table's rows", "columns in another order", "with dropout", "with noise", "dropout"}
RANDOM |= {"drawn by trial"}
EXPECTED: dict[str, tuple[dict[str, cases.Case], str]] = {
    "means": (cases.MEANS, "mean"),
    "sums": (cases.SUMS, "sum"),
    "separate": (cases.SEPARATE, "mean"),
    "alone": (cases.ALONE, "mean"),
    "together": (cases.TOGETHER, REFUSED),
    "mixed": (cases.MIXED, REFUSED),
    "meeting": (cases.MEETING, REFUSED),
    "by place": (cases.BY_PLACE, REFUSED),
    "weighed": (cases.WEIGHED, REFUSED),
    "others": (cases.OTHERS, REFUSED),
}
OTHERWISE: dict[str, str] = {}
LOSSES = [
    (name, make, OTHERWISE.get(name, kind))
    for table, kind in EXPECTED.values()
    for name, make in table.items()
    if name not in RANDOM
]


def wrong_ones(dtype: torch.dtype, num_steps: int) -> dict[str, tuple[str, str]]:
    found = {}
    for name, make, expected in LOSSES:
        torch.manual_seed(1)
        told = verdict_of(lambda m, x, make=make: make(m(x)), Model(), dtype=dtype, num_steps=num_steps)
        if told != expected:
            found[name] = (told, expected)
    return found


if __name__ == "__main__":
    for dtype in (torch.float32, torch.bfloat16):
        for n in (0, 20):
            print(dtype, n, len(LOSSES))
            for item in wrong_ones(dtype, n).items(): print("   ", item)
            def tokens(m, x):
                rows = m(x)
                return F.cross_entropy(rows.flatten(0, 1).float(), ROWS.labels.repeat_interleave(TOKENS))
            for table, exp in ((cases.LAYERS_MEETING, REFUSED), (cases.LAYERS_APART, "mean")):
                for name, make in table.items():
                    torch.manual_seed(1)
                    told = verdict_of(tokens, Model(make), dtype=dtype, num_steps=n, shape=(TOKENS, WIDTH))
                    if told != exp: print("   layer", name, told)
